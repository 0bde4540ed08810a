"""Folds: reductions over the rows of a matrix as a description, from which the kernel and the NumPy reference are made.

A fold walks over a row, once or more often. A walk has states; each element of the row contributes to them, partial
states of other parts of the row are combined, and results follow from the whole. After the last walk outputs are
written: one number for each element, or one for the row. Softmax:

    largest: max of x; total: sum of exp(x - largest), brought to a new maximum by exp(old_largest - largest)
    output: exp(x - largest) / total

Order of accumulation, the same for every tile and width: lane l of a subgroup of n takes the columns 4 (l + n r) ...
+ 3 in round r = 0, 1, ...; a plain sum has four accumulators a lane, to which a product is added by fma; they are
added as (0 + 1) + (2 + 3), and the lanes' by subgroupAdd. A sum that is brought to a new frame adds the four of a round
as (0 + 1) + (2 + 3) first. It is a function of the columns and the subgroup size alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .description_checks import mistyped, require_mapping, require_name, require_sequence
from .expr import RANDOM, Expr, checked_name, constant, equal, exp, variable, where
from .expr_numpy import evaluate
from .expr_walk import named, topological
from .kernel_text import freeze
from .step_parameters import StepParameters

# what an input is -> its shape for rows [..., cols]
INPUT_KINDS = {
    "row": "[..., cols] float32",
    "column": "[cols] float32, shared by the rows",
    "value": "[...] float32, one a row",
    "whole": "[...] int32, one a row: a `whole` of the expressions",
    "step": "a field of the step parameters",
}
OWN_NAMES = ("cols", "num_cols", "column")  # variable cols; wholes num_cols and column, the element's place in the row
SCALAR_KINDS = ("float", "int", "uint")
_STEP_FIELDS = tuple(each.name for each in fields(StepParameters) if each.name not in ("seed", "step"))


@dataclass(frozen=True)
class State:
    """One number that a walk keeps.

    merge: "sum" (starts at 0) or "max" (starts at -inf; NaN where any contribution is NaN). contribution: what an
    element brings, an expression of the inputs, earlier results, and states named before in this walk, as they are with
    this element in them. aligned: for a sum whose contributions depend on such a state: its value so far (under its own
    name) brought from `old_` + state to the new state.
    """

    name: str
    merge: str
    contribution: Expr
    aligned: Expr | None = None


@dataclass(frozen=True)
class Walk:
    """States, and what follows from them once the whole row is in: expressions of them, in order.

    Without states there is no walking: the results are what is worked out once a row.
    """

    states: Sequence[State]
    results: Mapping[str, Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)

    def check_types(self, owner: str) -> None:
        """Raises TypeError for states that are no list of them, and results that are no mapping."""
        require_sequence(owner, "walk.states", self.states, "[State(...)]", State)
        require_mapping(owner, "walk.results", self.results)


@dataclass(frozen=True, eq=False)
class FoldSpec:
    """A reduction over rows.

    inputs: name -> one of INPUT_KINDS. elements: outputs [..., cols]; one called like an input is written in its place.
    values: outputs [...], one a row. picks: name -> (row input, whole): the element at that place, or the last one
    where there is no such. skip: rows for which it holds are not walked over, all their outputs are 0. scalars: numbers
    of a call, "float eps, int last". Expressions also know the variable `cols` and the wholes `num_cols` and `column`.

    A name stands for one thing: one input, scalar, pick, state or result. Outputs may be called like picks, states and
    results. Raises ValueError for other names, and for an expression of something that is not known where it stands;
    TypeError for what is no str, no mapping, no list where one is needed. What is given is copied: its kernels may be
    printed long after.
    """

    name: str
    inputs: Mapping[str, str]
    walks: Sequence[Walk] = ()
    elements: Mapping[str, Expr] = field(default_factory=dict)
    values: Mapping[str, Expr] = field(default_factory=dict)
    picks: Mapping[str, tuple[str, Expr]] = field(default_factory=dict)
    skip: Expr | None = None
    scalars: str = ""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_inputs()
        self._check_names()
        of_row = {"cols", "num_cols", *self.scalar_kinds, *self.of_kind("value", "whole", "step")}
        of_element = {"column", *self.of_kind("row", "column")}
        for name, (source, index) in self.picks.items():
            self._check(name, index, of_row, kind="u")
            if source not in self.of_kind("row"):
                self._refuse(f"{name} is picked from {source!r}, which is no row input")
        of_row |= set(self.picks)
        if self.skip is not None:
            self._check("skip", self.skip, of_row, kind="b")
        for walk in self.walks:
            before: set[str] = set()
            for state in walk.states:
                if state.merge not in ("sum", "max") or (state.merge == "max" and state.aligned is not None):
                    self._refuse(f'state {state.name} is {state.merge!r}: it is a "sum", or a "max" without `aligned`')
                known = of_row | of_element | (set() if state.aligned is None else before)
                self._check(state.name, state.contribution, known)
                if state.aligned is not None:
                    self._check(state.name, state.aligned, {state.name, *before, *(f"old_{name}" for name in before)})
                elif state.merge == "max":
                    before.add(state.name)
            of_row |= {state.name for state in walk.states}
            for name, result in walk.results.items():
                self._check(name, result, of_row)
                of_row.add(name)
        for name, value in self.values.items():
            self._check(name, value, of_row)
        for name, element in self.elements.items():
            self._check(name, element, of_row | of_element)
        if not (self.elements or self.values):
            self._refuse("it has no output: name some in `elements` (of the row's shape) or `values` (one a row)")
        freeze(self)

    def _refuse(self, what: str) -> None:
        raise ValueError(f"fold {self.name!r}: {what}")

    def _check_types(self) -> None:
        require_name("fold", self.name)
        owner = f"fold {self.name!r}"
        for what in ("inputs", "elements", "values", "picks"):
            require_mapping(owner, what, getattr(self, what))
        require_sequence(owner, "walks", self.walks, "[Walk(...)]", Walk)
        for walk in self.walks:
            walk.check_types(owner)
        for name, pick in self.picks.items():
            if isinstance(pick, str) or not isinstance(pick, Sequence) or len(pick) != 2:
                raise mistyped(owner, f"pick {name}", pick, "a row input's name and a whole number, such as ('x', at)")
        if not isinstance(self.scalars, str):
            raise mistyped(owner, "scalars", self.scalars, "a str of types and names, such as 'float eps, int last'")

    def _check_inputs(self) -> None:
        for name, kind in self.inputs.items():
            if kind not in list(INPUT_KINDS):  # it may not be hashable
                self._refuse(f"input {name} is {kind!r}, not one of {', '.join(INPUT_KINDS)}")
            if kind == "step" and name not in _STEP_FIELDS:
                self._refuse(f"{name} is no step parameter: those are {', '.join(_STEP_FIELDS)}")
        if not self.of_kind("row"):
            self._refuse('it has no row input to fold over: call one of the inputs a "row"; engine.map needs none')
        for part in self.scalars.split(",") if self.scalars.strip() else ():
            if len(part.split()) != 2 or part.split()[0] not in SCALAR_KINDS:
                self._refuse(f"scalar {part.strip()!r} is not a type ({', '.join(SCALAR_KINDS)}) and a name")

    def _check_names(self) -> None:
        states = [state for walk in self.walks for state in walk.states]
        things = [(name, f"{kind} input") for name, kind in self.inputs.items()]
        things += [(part.split()[1], "scalar") for part in self.scalars.split(",") if part.strip()]
        outputs = list(things)
        things += [(name, "pick") for name in self.picks] + [(state.name, "state") for state in states]
        things += [(name, "result") for walk in self.walks for name in walk.results]
        things += [
            (f"old_{state.name}", f"max state {state.name}'s value before") for state in states if _is_max(state)
        ]
        in_place = [name for name in self.elements if self.inputs.get(name) == "row"]
        outputs += [(name, "element output") for name in self.elements if name not in in_place]
        outputs += [(name, "value output") for name in self.values]
        for each in (things, outputs):
            taken: dict[str, str] = {}
            for name, what in each:
                if name in OWN_NAMES and each is things:
                    self._refuse(f"{what} {name!r} is called like one of {', '.join(OWN_NAMES)}: rename it")
                if checked_name(name).startswith("_"):
                    self._refuse(f"{what} {name!r} begins with an underscore: those names are the kernel's own")
                if name in taken:
                    self._refuse(f"{name!r} is the name of two things, {taken[name]} and {what}: rename one of them")
                taken[name] = what

    def _check(self, what: str, root: Expr, known: set[str], kind: str = "f") -> None:
        if not isinstance(root, Expr) or root.kind != kind:
            needed = {"f": "a float", "b": "a condition", "u": "a whole number"}[kind]
            self._refuse(f"{what} is {root!r}, needed is {needed}: an expression (engine/expr.py)")
        floats, wholes = named([root]), named([root], "whole")
        for name in (*(known & self.wholes).intersection(floats), *(known - self.wholes).intersection(wholes)):
            is_, as_ = ("whole number", "whole") if name in self.wholes else ("float", "variable")
            self._refuse(f"{what} takes {name} for something else: it is a {is_}, {as_}({name!r})")
        unknown = [name for name in (*floats, *wholes) if name not in known]
        if unknown or any(node.op in RANDOM for node in topological([root])):
            wrong, right = ", ".join(unknown) or "random numbers", ", ".join(sorted(known))
            self._refuse(f"{what} depends on {wrong}; known there are {right}")

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the inputs of these kinds, in order."""
        return [name for name, kind in self.inputs.items() if kind in kinds]

    @property
    def tensor_inputs(self) -> list[str]:
        """Names of the inputs that are tensors, in order."""
        return [name for name, kind in self.inputs.items() if kind != "step"]

    @property
    def scalar_kinds(self) -> dict[str, str]:
        """Type of each scalar by name."""
        words = [part.split() for part in self.scalars.split(",") if part.strip()]
        return {name: kind for kind, name in words}

    @property
    def wholes(self) -> set[str]:
        """Names of the whole numbers."""
        ints = [name for name, kind in self.scalar_kinds.items() if kind != "float"]
        return {*self.of_kind("whole"), "num_cols", "column", *ints}

    @property
    def num_loops(self) -> int:
        """How often a kernel goes over a row."""
        return sum(bool(walk.states) for walk in self.walks) + bool(self.elements)

    def reference(self, step: StepParameters | None = None, **arrays: Any) -> list[np.ndarray]:
        """The outputs in NumPy, elements first, in the type of the arrays. arrays: inputs and scalars by name."""
        held: dict[str, Any] = {}
        for name, kind in self.inputs.items():
            array = np.float64(getattr(step, name)) if kind == "step" else np.asarray(arrays[name])
            held[name] = array[..., None] if kind in ("value", "whole") else array
        held |= {name: arrays[name] for name in self.scalar_kinds}
        first = held[self.of_kind("row")[0]]
        cols = first.shape[-1]
        held |= {"cols": float(cols), "num_cols": cols, "column": np.arange(cols)}

        def value(root: Expr) -> np.ndarray:
            used = {name for op in ("variable", "whole") for name in named([root], op)}
            given: dict[str, Any] = {name: held[name] for name in used}
            given["_"] = np.zeros((1,) * first.ndim, first.dtype)  # gives the type: there may be no array among them
            return evaluate([root], **given)[0]

        for name, (source, index) in self.picks.items():
            at = value_of_whole(index, held)
            places = np.minimum(np.broadcast_to(at, (*first.shape[:-1], 1)).astype(np.int64) & 0xFFFFFFFF, cols - 1)
            held[name] = np.take_along_axis(held[source], places, axis=-1)
        for walk in self.walks:
            for state in walk.states:
                given = np.broadcast_to(value(state.contribution), first.shape)
                merge = np.max if state.merge == "max" else np.sum
                held[state.name] = merge(given, axis=-1, keepdims=True)
            for name, result in walk.results.items():
                held[name] = value(result)
        skipped = np.bool_(False) if self.skip is None else value(self.skip_as_number) != 0
        elements = [np.where(skipped, 0, value(root)) for root in self.elements.values()]
        values = [np.where(skipped, 0, value(root)) for root in self.values.values()]
        whole_row, one = first.shape, (*first.shape[:-1], 1)
        return [np.broadcast_to(a, whole_row).astype(first.dtype) for a in elements] + [
            np.broadcast_to(a, one)[..., 0].astype(first.dtype) for a in values
        ]

    @property
    def skip_as_number(self) -> Expr:
        """1 where a row is skipped, else 0."""
        assert self.skip is not None
        return where(self.skip, 1.0, 0.0)


def _is_max(state: State) -> bool:
    return state.merge == "max"


def value_of_whole(index: Expr, held: Mapping[str, Any]) -> Any:
    """The number or array behind a whole number."""
    return held[index.name] if index.name else np.asarray(int(index.number))


def online_softmax(score: Expr, largest: str = "largest", total: str = "total") -> Walk:
    """Maximum of the scores and sum of exp(score - maximum), in one walk (Milakov & Gimelshein 2018).

    Entries of -inf count as absent; while there is nothing else, 0 is subtracted, as -inf - -inf would be NaN.
    """
    top, old, so_far = variable(largest), variable(f"old_{largest}"), variable(total)
    weight = exp(score - softmax_shift(top), nonpositive=True)
    decay = exp(old - softmax_shift(top), nonpositive=True)
    return Walk((State(largest, "max", score), State(total, "sum", weight, aligned=so_far * decay)))


def softmax_shift(largest: Expr) -> Expr:
    """What is subtracted from scores: their maximum, or 0 where there is none."""
    return where(equal(largest, constant(-np.inf)), 0.0, largest)
