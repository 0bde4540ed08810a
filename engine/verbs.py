"""The verbs of every engine: each op's function, bound as a method, so that `engine.matmul(a, b)` is typed and listed.

An op's function takes the engine first; as a class attribute it is a method like any other.
"""

from __future__ import annotations


class OpVerbs:
    """All ops. The text of each is in engine/ops/, one file an op."""

