"""Environment switches: types, defaults, bad values, unknown names, and that there is one table."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from vkfold.engine import switches
from vkfold.engine.errors import BadInputError

ROOT = Path(switches.__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VKFOLD_DEVICE", " 1 ", "1"),
        ("VKFOLD_DEVICE", "radeon", "radeon"),
        ("VKFOLD_DEBUG", "0", 0),
        ("VKFOLD_DEBUG", "3", 3),
        ("VKFOLD_CACHE_DIR", "/some/where", Path("/some/where")),
        ("VKFOLD_VARIANT", "matmul=tile_8x8", "matmul=tile_8x8"),
        ("VKFOLD_CHECK_RECOMPUTE", "1", True),
        ("VKFOLD_TRANSFER_QUEUE", "shared", "shared"),
        ("VKFOLD_LOG", "DEBUG", "debug"),
    ],
)
def test_values_are_typed(name: str, text: str, value: object) -> None:
    assert switches.get(name, {name: text}) == value


def test_defaults_where_unset_or_empty() -> None:
    for environment in ({}, dict.fromkeys(switches.SWITCHES, "")):
        values = {name: switches.get(name, environment) for name in switches.SWITCHES}
        assert values == {
            "VKFOLD_DEVICE": None,
            "VKFOLD_DEBUG": 0,
            "VKFOLD_CACHE_DIR": None,
            "VKFOLD_REPLAY": True,
            "VKFOLD_TUNE": True,
            "VKFOLD_VARIANT": None,
            "VKFOLD_CHECK_RECOMPUTE": False,
            "VKFOLD_FUSION": "1",
            "VKFOLD_TRANSFER_QUEUE": "auto",
            "VKFOLD_LOG": "warning",
        }


def test_values_are_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "1")
    assert switches.get("VKFOLD_DEBUG") == 1
    monkeypatch.setenv("VKFOLD_DEBUG", "2")
    assert switches.get("VKFOLD_DEBUG") == 2


@pytest.mark.parametrize(("name", "text"), [("VKFOLD_DEBUG", "4"), ("VKFOLD_DEBUG", "yes"), ("VKFOLD_LOG", "loud")])
def test_a_bad_value_names_switch_value_and_choices(name: str, text: str) -> None:
    with pytest.raises(BadInputError, match=f"{name}={text}: expected") as caught:
        switches.get(name, {name: text})
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)


def test_a_file_is_no_cache_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(BadInputError, match="expected a folder"):
        switches.get("VKFOLD_CACHE_DIR", {"VKFOLD_CACHE_DIR": str(file)})


def test_an_unknown_switch_in_the_code_is_an_error() -> None:
    with pytest.raises(KeyError):
        switches.get("VKFOLD_NOPE")


def test_an_unknown_variable_warns_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"VKFOLD_DEVCE": "0", "OTHER": "1", "VKFOLD_DEBUG": "1"}
    assert switches.unknown_variables(environment) == [
        "VKFOLD_DEVCE is set but is no switch of vkfold: did you mean VKFOLD_DEVICE?"
    ]
    switches._warned.clear()
    with caplog.at_level(logging.WARNING, "vkfold"):
        assert switches.get("VKFOLD_DEBUG", environment) == 1
        switches.get("VKFOLD_DEVICE", environment)
    assert [record.message for record in caplog.records] == switches.unknown_variables(environment)


def test_describe_has_one_documented_row_a_switch() -> None:
    rows = switches.describe({"VKFOLD_DEBUG": "2"})
    assert [row[0] for row in rows] == list(switches.SWITCHES)
    assert {row[0]: row[2] for row in rows}["VKFOLD_DEBUG"] == "2"
    assert all(len(row[3]) > 10 for row in rows)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path / "cache"))
    assert switches.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("VKFOLD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert switches.cache_folder() == tmp_path / "vkfold"


def test_every_switch_named_in_the_code_is_in_the_table() -> None:
    for folder in ("engine", "memory_pool", "nn", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            named = set(re.findall(r"VKFOLD_[A-Z_]+[A-Z]", text))
            assert named <= set(switches.SWITCHES), f"{file.name} names {named - set(switches.SWITCHES)}"
            if file.name != "switches.py":
                assert not re.search(r"(environ|getenv)\W+VKFOLD_", text), f"{file.name} reads a switch by itself"
