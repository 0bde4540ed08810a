"""The kinds of calls that a training step made the last time, so that the next run prepares them before its first step.

A kind is an op with the shapes and types of its inputs, and its settings. The first call of a kind works out its rule,
chooses variants and finds kernels: a fraction of a millisecond, whatever the sizes, which counts in a small step. What
is remembered (pipeline_memory.py) is plain data. It is not trusted: a kind that cannot be prepared is left to its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .host_values import checked_spec
from .op import OPS
from .switches import logger

if TYPE_CHECKING:
    from .vulkan_engine import VulkanEngine

MAX_CALLS = 512  # of a program

CallKind = tuple[str, list[Any], dict[str, Any]]  # op; [shape, dtype] or None for each input; settings by name


def start_counting(engine: VulkanEngine) -> None:
    """`calls_since` tells of calls from now on."""
    for rule in engine.known_rules.values():
        rule.used = False


def calls_since(engine: VulkanEngine) -> list[CallKind]:
    """The kinds of calls since `start_counting` whose settings are plain values."""
    found = []
    for (op, *rest), rule in engine.known_rules.items():
        settings, is_known = _plain(rule.settings), OPS.get(op.name) is op
        if rule.used and is_known and settings is not None:
            specs = rest[: len(rest) - 2 * len(rule.settings)]
            inputs = [None if spec is None else [list(spec.shape), spec.dtype] for spec in specs]
            found.append((op.name, inputs, settings))
    return found[:MAX_CALLS]


def prepare_calls(engine: VulkanEngine, calls: Iterable[CallKind]) -> int:
    """Do what the first call of each kind would do before it is recorded; returns for how many that worked.

    Records nothing and allocates nothing on the device, but for checks of variants that this device has not had yet.
    """
    done = 0
    for name, specs, settings in calls:
        try:
            given = {key: tuple(value) if type(value) is list else value for key, value in settings.items()}
            inputs = [None if spec is None else checked_spec(*spec) for spec in specs]
            engine.prepare_call(OPS[name], inputs, given)
            done += 1
        except Exception as error:
            logger.info("a call of %s that was remembered is not prepared: %s", name, error)
    return done


def _plain(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings as JSON gives them back; None where it would not."""
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        if type(value) is tuple and all(map(_is_plain, value)):
            plain[name] = list(value)
        elif value is None or type(value) is str or _is_plain(value):
            plain[name] = value
        else:
            return None
    return plain


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, float) or (type(value) is int and abs(value) < 2**64)
