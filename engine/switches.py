"""Every environment switch, in one table. Read at call time, so a test or a program may change them.

`get("VKFOLD_DEVICE")` gives the typed value, `describe()` what there is and what is set, `cache_folder()` where
compiled kernels and pipelines are kept.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadInputError

PREFIX = "VKFOLD_"
logger = logging.getLogger("vkfold")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _text(value: str) -> str:
    return value


def _debug_level(value: str) -> int:
    if value not in ("0", "1", "2", "3"):
        raise ValueError("expected 0, 1, 2 or 3")
    return int(value)


def _log_level(value: str) -> str:
    if value.lower() not in _LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(_LOG_LEVELS)}")
    return value.lower()


def _on_off(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return value == "1"


def _transfer_queue(value: str) -> str:
    if value not in ("auto", "off", "shared"):
        raise ValueError("expected auto, off or shared")
    return value


def _fusion(value: str) -> str:
    if value not in ("0", "1", "all"):
        raise ValueError("expected 0, 1 or all")
    return value


def _folder(value: str) -> Path:
    try:
        path = Path(value).expanduser()
        is_file = path.exists() and not path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be looked into; ~nobody
        raise ValueError(f"expected a folder: {getattr(error, 'strerror', None) or error}") from None
    if is_file:
        raise ValueError("expected a folder, this is a file")
    return path


def _variants(value: str) -> str:
    for part in filter(None, (part.strip() for part in value.split(","))):
        op, equals, variant = (word.strip() for word in part.partition("="))
        if not (op and equals and variant):
            raise ValueError(f"{part!r} is not op=variant, for example matmul=shuffle_16x8u2")
    return value


@dataclass(frozen=True)
class Switch:
    """One switch: `parse` turns the variable's text into the value or raises ValueError saying what is expected."""

    name: str
    type_name: str
    default: Any
    parse: Callable[[str], Any]
    help: str


SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch("VKFOLD_DEVICE", "text", None, _text, "device to use: index, part of its name, or UUID"),
        Switch(
            "VKFOLD_DEBUG",
            "0..3",
            0,
            _debug_level,
            "1: validation layers; 2: also guard words around tensors and NaN in fresh and freed memory; "
            "3: also a check that each op changed only what it declared",
        ),
        Switch("VKFOLD_CACHE_DIR", "folder", None, _folder, "compiled kernels, pipelines and tuning results"),
        Switch(
            "VKFOLD_FUSION",
            "0, 1 or all",
            "1",
            _fusion,
            "0: launch every op by itself; all: CPU drivers, too, save bytes at the cost of arithmetic; the same bits",
        ),
        Switch("VKFOLD_REPLAY", "0 or 1", True, _on_off, "0: record every training step; the bits are the same"),
        Switch("VKFOLD_TUNE", "0 or 1", True, _on_off, "0: leave what `vkfold tune` measured aside"),
        Switch("VKFOLD_VARIANT", "text", None, _variants, "force kernel variants: op=variant, several with commas"),
        Switch(
            "VKFOLD_CHECK_RECOMPUTE",
            "0 or 1",
            False,
            _on_off,
            "1: hash every recomputed tensor and name the first that is not what forward made; slow",
        ),
        Switch(
            "VKFOLD_TRANSFER_QUEUE",
            "text",
            "auto",
            _transfer_queue,
            "where offloaded activations are copied. auto: on a queue of their own where the device has one; off: on "
            "the compute queue; shared: as auto, but both queues are the same one (a test of the ordering)",
        ),
        Switch("VKFOLD_LOG", "level", "warning", _log_level, f"what to log: {', '.join(_LOG_LEVELS)}"),
    )
}

# Read when an engine opens, or of no matter to what it records.
_BEFORE_RECORDING = ("DEVICE", "DEBUG", "CACHE_DIR", "FUSION", "REPLAY", "TRANSFER_QUEUE", "LOG")
_WHILE_RECORDING = [name for name in SWITCHES if name.removeprefix(PREFIX) not in _BEFORE_RECORDING]

_warned: set[str] = set()


def get(name: str, environment: Mapping[str, str] | None = None) -> Any:
    """The value of a switch, its default where the variable is unset or empty.

    Raises BadInputError for a value that does not parse, KeyError for a switch that is not in the table. Variables
    that start with VKFOLD_ and are none of ours are warned about, once each.
    """
    switch = SWITCHES[name]
    env = os.environ if environment is None else environment
    for message in unknown_variables(env):
        if message not in _warned:
            _warned.add(message)
            logger.warning(message)
    return _value(switch, env.get(name, ""))


def _value(switch: Switch, text: str) -> Any:
    text = text.strip()
    if not text:
        return switch.default
    try:
        return switch.parse(text)
    except ValueError as error:
        raise BadInputError(f"{switch.name}={text}: {error} ({switch.help})") from None


def check(environment: Mapping[str, str] | None = None) -> None:
    """Read every switch. Raises BadInputError for the first whose value does not parse: before any work, not in it."""
    for name in SWITCHES:
        get(name, environment)


def is_on(name: str) -> bool:
    """The value of a "0 or 1" switch, for use in every step: cheaper than `get`, and silent about other variables.

    Raises BadInputError for a value that is neither.
    """
    if _KNOWN is not None and _ENCODED[name] not in _KNOWN:
        return _DEFAULTS[name]
    return bool(_value(SWITCHES[name], os.environ.get(name, "")))


_KNOWN: Any = getattr(os.environ, "_data", None)  # None: a Python that has none
_ENCODED: dict[str, Any] = {name: getattr(os.environ, "encodekey", str)(name) for name in SWITCHES}
_DEFAULTS: dict[str, Any] = {name: switch.default for name, switch in SWITCHES.items()}
_KEYS_WHILE_RECORDING = [_ENCODED[name] for name in _WHILE_RECORDING]


def raw(name: str) -> str:
    """The text of a switch as it stands, "" when unset: for what is looked at in every op, where `get` is too slow.

    `os.environ` raises and catches an error for a variable that is not set, which takes longer than all else that
    looking for a variant does; so its own dictionary is asked whether there is one.
    """
    if _KNOWN is not None and _ENCODED[name] not in _KNOWN:
        return ""
    return os.environ.get(name, "")


def snapshot() -> tuple[Any, ...]:
    """The text, unparsed, of every switch that may change what an open engine records. Cheap enough for every step."""
    environment = os.environ
    known = getattr(environment, "_data", None)
    if known is None:
        return tuple(map(environment.get, _WHILE_RECORDING))
    return tuple(map(known.get, _KEYS_WHILE_RECORDING))


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One message for each VKFOLD_ variable that is not in the table, with the nearest name that is."""
    messages = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in SWITCHES:
            near = difflib.get_close_matches(name, SWITCHES, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SWITCHES)}"
            messages.append(f"{name} is set but is no switch of vkfold: {hint}")
    return messages


def describe(environment: Mapping[str, str] | None = None) -> list[tuple[str, str, str, str]]:
    """One row a switch: name, type, value now ("-" for none), documentation. Raises as `get` does."""
    rows = []
    for switch in SWITCHES.values():
        value = get(switch.name, environment)
        rows.append((switch.name, switch.type_name, "-" if value is None else str(value), switch.help))
    return rows


def cache_folder() -> Path:
    """Where caches live: VKFOLD_CACHE_DIR, else the platform's place for caches. It need not exist yet."""
    chosen = get("VKFOLD_CACHE_DIR")
    if chosen is not None:
        return chosen
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vkfold"


def apply_log_level() -> None:
    """Set the package's logger to VKFOLD_LOG; its lines go to standard error unless the program set up logging."""
    level = get("VKFOLD_LOG")
    logger.setLevel(level.upper())
    if level in ("debug", "info") and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("vkfold: %(message)s"))
        logger.addHandler(handler)
