"""Options of a program from one dataclass: its command line, its config file, its checks.

Each field made with `option` is an option of the same name (`d_model` is `--d-model`). A config file in TOML or JSON
may set the same names; the command line wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..engine.errors import BadInputError
from .small_files import MAX_SETTINGS_BYTES, read_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Rule = tuple[str, Callable[[Any], bool]]

POSITIVE: Rule = ("greater than 0", lambda value: value > 0)
NOT_NEGATIVE: Rule = ("0 or more", lambda value: value >= 0)
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
FRACTION: Rule = ("at least 0 and less than 1", lambda value: 0 <= value < 1)


def between(low: int, high: int) -> Rule:
    """From low to high, both included."""
    return f"from {low:,} to {high:,}", lambda value: low <= value <= high


def option(
    kind: type,
    default: Any,
    help: str,
    *,
    group: str = "options",
    choices: Sequence[str] | None = None,
    rule: Rule | None = None,
    repeated: bool = False,
    bare: Any = None,
) -> Any:
    """A dataclass field that is an option.

    kind: int, float, str or bool. rule: what a value must be, in words, and the test of it. repeated: the program's
    positional arguments. bare: what the option given without a value means, where that is allowed. A default of None
    means "worked out from the others" and is not checked.
    """
    metadata = {"kind": kind, "help": help, "group": group, "choices": choices, "rule": rule}
    metadata |= {"repeated": repeated, "bare": bare}
    if repeated:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """The option of a field as typed: "d_model" is "--d-model"."""
    return "--" + name.replace("_", "-")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes from "4GB" (decimal), "512MiB" (binary), "1.5 GB" or a plain number.

    Raises BadInputError for anything else, less than one byte, or 2^63 bytes and more.
    """
    match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = 0 if match is None or unit is None else int(Fraction(match[1]) * unit)
    if not 1 <= nbytes < 2**63:
        raise BadInputError(f"{shown(text)} is no number of bytes: write 4GB, 512MiB or 1500000000, below 2^63")
    return nbytes


def shown(value: Any) -> str:
    """A value as an error message shows it: not the thousands of characters that it may have."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python itself refuses to print the longest
        return f"a number of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a list of such numbers, or lists in lists
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message} (see --help)")


def parse_options(cls: type[T], argv: Sequence[str], program: str, description: str) -> tuple[T, set[str]]:
    """The options, and the names of those that the command line or the config file gave.

    Raises BadInputError for an unknown option (with the nearest one), or a value that fails its check.
    """
    parser = _Parser(prog=program, description=description, allow_abbrev=False)
    groups: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for field in fields.values():
        _add_argument(parser, groups, field)
    values, rest = parser.parse_known_args(argv)
    given = vars(values)
    for word in rest:  # an option between two inputs leaves the second one over
        if word.startswith("-") and word != "-":
            name = word.split("=")[0].lstrip("-")
            raise BadInputError(f"unknown option {word}: {_nearest(name, fields, flag)}")
    positional = next((f.name for f in fields.values() if f.metadata["repeated"]), None)
    if rest:
        if positional is None:
            raise BadInputError(f"unexpected argument {rest[0]!r} (see --help)")
        given[positional] = [*given.get(positional, []), *rest]
    if positional and not given.get(positional):
        given.pop(positional, None)
    if "config" in fields and given.get("config"):
        given = read_config_file(Path(given["config"]), fields.values()) | given
    config = cls(**given)
    check_values(config)
    return config, set(given)


def _add_argument(parser: argparse.ArgumentParser, groups: dict[str, Any], field: dataclasses.Field[Any]) -> None:
    data = field.metadata
    if data["repeated"]:
        parser.add_argument(field.name, nargs="*", metavar=field.name.upper(), help=data["help"], default=[])
        return
    group = groups.get(data["group"])
    if group is None:
        group = groups[data["group"]] = parser.add_argument_group(data["group"])
    text = data["help"] + ("" if field.default in (None, False) else f" (default {field.default})")
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if data["kind"] is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        kind = data["kind"]
        settings |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        if data["choices"]:
            settings |= {"choices": data["choices"], "metavar": "{" + ",".join(data["choices"]) + "}"}
        if data["bare"] is not None:
            settings |= {"nargs": "?", "const": data["bare"]}
    group.add_argument(flag(field.name), **settings)


def read_config_file(path: Path, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Values of a TOML or (name ending in .json) JSON file, by field name; "-" and "_" in names are the same.

    Raises BadInputError for a file that cannot be read, an unknown name (with the nearest one), a name given twice, or
    a wrong type.
    """
    known = {field.name: field for field in fields if field.name != "config"}
    try:
        raw = read_whole(path, MAX_SETTINGS_BYTES).decode("utf-8")
        is_json = path.suffix == ".json"
        values = json.loads(raw, object_pairs_hook=_without_duplicates) if is_json else tomllib.loads(raw)
    except OSError as error:
        raise BadInputError(f"cannot read the config file {path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise BadInputError(f"the config file {path} is not valid: lists in it are nested too deeply") from error
    except ValueError as error:  # both parsers' errors, and UnicodeDecodeError
        raise BadInputError(f"the config file {path} is not valid: {error}") from error
    if not isinstance(values, dict):
        raise BadInputError(f"the config file {path} must hold names and values, not a {type(values).__name__}")
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise BadInputError(f"{path}: unknown name {shown(key)}: {_nearest(name, known, str)}")
        if name in result:
            raise BadInputError(f"{path}: {name} is given twice, with - and with _: which one counts?")
        try:
            result[name] = typed_value(known[name], value)
        except BadInputError as error:
            raise BadInputError(f"{path}: {error}") from None
    return result


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return values


def typed_value(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value from a file as the option's type; whole numbers pass for numbers. Raises BadInputError for another."""
    kind = field.metadata["kind"]
    if field.metadata["repeated"]:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise BadInputError(f"{field.name} must be a text or a list of texts, not {shown(value)}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST_FLOAT32:
            raise BadInputError(f"{field.name} {shown(value)} is beyond what float32 holds, {LARGEST_FLOAT32:.1e}")
        value = float(value)
    if value is None and field.default is None:
        return None
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise BadInputError(f"{field.name} must be {names[kind]}, not {shown(value)}")
    return value


def check_values(config: Any) -> None:
    """Check each value by itself. Raises BadInputError naming the option, the value and what it must be."""
    for field in dataclasses.fields(config):
        value, data = getattr(config, field.name), field.metadata
        if value is None or data["repeated"]:
            continue
        name = flag(field.name)
        if data["choices"] and value not in data["choices"]:
            raise BadInputError(f"{name} {value[:80]}: choose from {', '.join(data['choices'])}")
        if data["kind"] is float and not math.isfinite(value):
            raise BadInputError(f"{name} {value} is not a finite number")
        if data["kind"] is float and abs(value) > LARGEST_FLOAT32:
            raise BadInputError(f"{name} {value} is beyond what float32 holds, {LARGEST_FLOAT32:.1e}")
        if data["kind"] is int and abs(value) >= 2**63:
            raise BadInputError(f"{name} {shown(value)} must be less than 2^63")
        if data["rule"] and not data["rule"][1](value):
            raise BadInputError(f"{name} {value} must be {data['rule'][0]}")


def _nearest(name: str, known: Iterable[str], show: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f"did you mean {show(near[0])}?" if near else "see --help for what there is"
