"""`./run bench`: the protocol with its workers, rows, and libraries that fail. Nothing is downloaded here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(__file__).resolve().parent.parent / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import compare  # noqa: E402
import drivers  # noqa: E402
import environments  # noqa: E402
import goals  # noqa: E402
import suite  # noqa: E402
import work as works  # noqa: E402
from peer_process import PeerFailed, PeerProcess, PeerUnsupported  # noqa: E402

WORKER = [sys.executable, str(PEERS / "worker.py")]
TINY = ("matmul 24", "matmul 9x17x5 TT", "attention 1x2x20x8 f+b", "mlp step")


def worker(name: str, **environment: str) -> PeerProcess:
    """A worker of a library."""
    return PeerProcess([*WORKER, name], {**os.environ, **environment})


# -- works -----------------------------------------------------------------------------------------------------------
def test_names_of_works() -> None:
    """Every default name is a work; sizes and transposes are read from the name."""
    for name in works.DEFAULT:
        assert works.work_named(name).name == name
    found = works.work_named("matmul 9x17x5 TN")
    assert isinstance(found, works.Matmul)
    assert (found.m, found.k, found.n, found.trans_a, found.trans_b) == (9, 17, 5, True, False)
    for name in ("matmul", "matmul 0", "matmul 3x4", "attention 1x2x3 f+b", "nothing"):
        with pytest.raises(ValueError, match="is no work"):
            works.work_named(name)


def test_attention_reference_is_a_gradient() -> None:
    """d_q, d_k and d_v of the reference equal central differences of sum(o * d_o)."""
    work = works.Attention("", 1, 1, 5, 3)
    inputs = [x.astype(np.float64) for x in work.inputs()]
    expected = work.reference()

    def value(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_o: np.ndarray) -> float:
        s = np.where(np.tri(5, dtype=bool), q @ k.swapaxes(-1, -2) / math.sqrt(3), -np.inf)
        p = np.exp(s)
        return float((p / p.sum(-1, keepdims=True) @ v * d_o).sum())

    for i, name in enumerate(("d_q", "d_k", "d_v")):
        for at in np.ndindex(inputs[i].shape):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in inputs]
                moved[i][at] += sign * 1e-5
                ends.append(value(*moved))
            assert abs((ends[0] - ends[1]) / 2e-5 - expected[name][at]) < 1e-7


def test_perceptron_reference_is_a_gradient() -> None:
    """Gradients behind the reference losses equal central differences."""
    work = works.MlpStep(sizes=(3, 4, 5, 2), batch=6)
    x, labels = work.data()
    parameters = [p.astype(np.float64) for pair in work.weights() for p in pair]
    loss, gradients = work._gradients(x.astype(np.float64), labels, parameters)
    assert loss == pytest.approx(work.reference()["losses"][0], rel=1e-12)
    for p, g in zip(parameters, gradients, strict=True):
        for at in np.ndindex(p.shape):
            ends = []
            for sign in (1, -1):
                p[at] += sign * 1e-6
                ends.append(work._gradients(x.astype(np.float64), labels, parameters)[0])
                p[at] -= sign * 1e-6
            assert abs((ends[0] - ends[1]) / 2e-6 - g[at]) < 1e-7


def test_error_of() -> None:
    """Relative to the largest reference value; what is missing or not finite is infinitely wrong."""
    wanted = {"a": np.array([2.0, 4.0])}
    assert works.error_of({"a": np.array([2.0, 5.0], np.float32)}, wanted) == 0.25
    for wrong in ({}, {"a": np.array([2.0])}, {"a": np.array([2.0, np.nan])}):
        assert works.error_of(wrong, wanted) == math.inf


# -- protocol --------------------------------------------------------------------------------------------------------
def test_a_worker_answers(tmp_path: Path) -> None:
    """hello, prepare, run, result; what it cannot do and what is wrong are told apart, and it goes on after both."""
    with worker("numpy") as peer:
        hello = peer.ask({"do": "hello"}, 60)
        assert (hello["library"], hello["version"]) == ("numpy", np.__version__)
        with pytest.raises(PeerUnsupported, match="automatic differentiation"):
            peer.ask({"do": "prepare", "work": "mlp step"}, 60)
        with pytest.raises(PeerFailed, match="ValueError: 'matmul' is no work"):
            peer.ask({"do": "prepare", "work": "matmul"}, 60)
        peer.ask({"do": "prepare", "work": "matmul 24"}, 60)
        ran = peer.ask({"do": "run", "repeats": 3, "lead": 2}, 60)
        assert len(ran["ms"]) == 3 and min(ran["ms"]) > 0 and ran["cpu_ms"] > 0
        peer.ask({"do": "result", "file": str(tmp_path / "r.npz")}, 60)
        with np.load(tmp_path / "r.npz") as results:
            assert works.error_of(dict(results), works.work_named("matmul 24").reference()) < 1e-6
    assert not peer.alive


def test_chatter_does_not_reach_the_protocol(tmp_path: Path) -> None:
    """A library that prints to standard output, from Python and below it, is understood all the same."""
    (tmp_path / "chatty_peer.py").write_text(
        "import os\n"
        "class Library:\n"
        "    version, device = '1', 'somewhere'\n"
        "    def __init__(self):\n"
        "        print('hello from Python', flush=True)\n"
        "        os.write(1, b'hello from below')\n"
    )
    with worker("chatty", PYTHONPATH=str(tmp_path)) as peer:
        assert peer.ask({"do": "hello"}, 60)["device"] == "somewhere"


def test_a_worker_that_dies_or_hangs() -> None:
    """The last thing it said, or the time it was given."""
    code = "import sys; input(); print('out of luck', file=sys.stderr); sys.exit(3)"
    with (
        PeerProcess([sys.executable, "-c", code], os.environ) as peer,
        pytest.raises(PeerFailed, match="exit code 3: out of luck"),
    ):
        peer.ask({"do": "hello"}, 60)
    with (
        PeerProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ) as peer,
        pytest.raises(PeerFailed, match="no answer to 'run' within 0 s"),
    ):
        peer.ask({"do": "run"}, 0.2)


# -- the whole -------------------------------------------------------------------------------------------------------
def test_rows_of_a_small_run(tmp_path: Path) -> None:
    """One command: a JSON list with a row for each work and library, errors at float32 level, ratios to vkfold."""
    file = tmp_path / "rows.json"
    command = [sys.executable, str(PEERS / "suite.py"), "--rounds", "2", "--json", str(file)]
    command += [word for name in TINY for word in ("--only", name)]
    command += ["--library", "vkfold", "--library", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(r["work"], r["library"]) for r in rows] == [(w, p) for w in TINY for p in ("vkfold", "numpy")]
    for row in rows:
        assert all(row[name] for name in ("version", "driver", "device"))
        if row["library"] == "numpy" and not row["work"].startswith("matmul"):
            assert row["ms"] is None and row["failed"].startswith("unsupported: ")
            assert f"not timed: numpy at {', '.join(TINY[2:])}: unsupported" in done.stdout
            continue
        assert row["rounds"] == 2 and 0 < row["best"] <= row["ms"]
        assert row["spread"] >= 0 and row["cpu_ms"] > 0
        assert row["error"] < 2e-5
        assert row["ratio"] == 1 if row["library"] == "vkfold" else row["ratio"] > 0
    assert {r["driver"] for r in rows if r["library"] == "numpy"} == {compare.NO_DRIVER}


def test_a_failing_library_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not installable, not importable, on another driver, or dying at work: a row says so, and the others go on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "dying_peer.py").write_text(
        "import os\nfrom numpy_peer import Library as Base\n"
        "class Job:\n"
        "    def run(self):\n"
        "        os.write(2, b'lost the device\\n'); os._exit(7)\n"
        "class Library(Base):\n"
        "    def prepare(self, work):\n"
        "        return Job()\n"
    )
    (tmp_path / "elsewhere_peer.py").write_text("from numpy_peer import Library\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    peers = [environments.Peer(name, vulkan=name == "elsewhere") for name in ("gone", "dying", "elsewhere", "numpy")]
    peers.append(environments.Peer("absent", (str(tmp_path / "no-such-wheel.whl"),)))
    for peer in peers:
        monkeypatch.setitem(environments.PEERS, peer.name, peer)
    driver = drivers.Driver(tmp_path / "none.json", str(tmp_path / "libnone.so"))
    said: list[str] = []
    comparison = compare.Comparison([p.name for p in peers], driver, compare.Limits(rounds=1), said.append)
    rows = {row["library"]: row for row in comparison.run([works.work_named("matmul 8")])}
    assert rows["numpy"]["error"] < 1e-6 and rows["numpy"]["ratio"] is None
    assert rows["gone"]["failed"] == "ModuleNotFoundError: No module named 'gone_peer'"
    assert rows["dying"]["failed"] == "ended with exit code 7: lost the device"
    assert "no-such-wheel.whl" in rows["absent"]["failed"]
    if sys.platform == "linux":
        assert rows["elsewhere"]["failed"] == f"did not load the driver {driver.library}"
    assert not [c for c in comparison.contenders if c.process is not None and c.process.alive]
    assert "gone: ModuleNotFoundError: No module named 'gone_peer'" in said


# -- goals, drivers, bad input ---------------------------------------------------------------------------------------
def test_goals_tell_reached_from_missed() -> None:
    """The best peer counts, unless its result is wrong; CPU libraries are no peers."""
    rows = [
        {"work": "matmul 512", "library": name, "driver": driver, "ratio": ratio, "error": error, "best": 10.0 * ratio}
        for name, driver, ratio, error in (
            ("vkfold", "lavapipe", 1.0, 1e-6),
            ("ggml", "lavapipe", 5.0, 3e-4),
            ("computeml", "lavapipe", 2.0, 0.5),
            ("numpy", "none (CPU)", 0.25, 1e-7),
        )
    ]
    rows.append(
        {"work": "matmul 512 NT", "library": "vkfold", "driver": "lavapipe", "ratio": 1.0, "error": None, "best": 20.0}
    )
    values = {goal.text: goal.value(rows) for goal in goals.GOALS}
    assert values["matmul 512: times as fast as the best Vulkan peer"] == 5.0
    assert values["matmul 512: share of NumPy's speed (goal on Mesa 25)"] == 0.25
    assert values["matmul 512 NT: rate over NN's"] == 0.5
    assert values["mlp step: times as fast as the best Vulkan peer"] is None
    assert suite.goals_table(rows).row_count == 3


def test_one_driver_for_all(tmp_path: Path) -> None:
    """An ICD file is read as the loader does, and workers get it and no other."""
    icd = tmp_path / "some.json"
    icd.write_text('{"ICD": {"library_path": "./libvulkan_some.so"}}')
    driver = drivers.read_icd(icd)
    assert driver.library == str((tmp_path / "libvulkan_some.so").resolve())
    environment = driver.environment({"A": "1", "VK_ADD_DRIVER_FILES": "other.json"})
    assert environment == {"A": "1", "VK_ICD_FILENAMES": str(icd), "VK_DRIVER_FILES": str(icd)}
    icd.write_text("[]")
    with pytest.raises(ValueError, match=r"some\.json is no Vulkan ICD file"):
        drivers.read_icd(icd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "sorting"], "'sorting' is no work"),
        (["--only", "matmul 100000x100000x100000"], "matmul 100000x100000x100000 needs at least 440,000,000,000 bytes"),
        (["--only", "attention 1x1x9999999x8 f+b"], "68,719,476,736 are available: choose a smaller size"),
        (["--only", "matmul 99999999999999999999"], "is no work"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        *((["--seconds", value], f"--seconds {value}: it must be a finite") for value in ("0", "-5", "nan", "inf")),
        *((["--timeout", value], f"--timeout {value}: it must be a number") for value in ("0", "-1", "nan", "inf")),
        (["--driver", "nowhere.json"], "nowhere.json is no Vulkan ICD file"),
        (["--json", "no/such/folder/rows.json"], "its folder does not exist"),
        (["--json", "."], "--json . is a folder: name a file in it, such as rows.json"),
        (["--json", "x" * 300], "cannot be written: File name too long"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and a message, before anything is installed or started."""
    monkeypatch.setattr(suite, "available_bytes", lambda: 64 * 2**30)
    monkeypatch.delattr(suite, "Comparison")
    assert suite.main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_rows_can_be_written_to(tmp_path: Path) -> None:
    """Looking leaves no file behind and changes none."""
    file = tmp_path / "rows.json"
    suite.check_writable(file)
    assert not file.exists()
    file.write_text("[]")
    suite.check_writable(file)
    assert file.read_text() == "[]"


def test_a_disk_that_fills_up_costs_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables are printed all the same; the exit code and a line tell."""
    icd = tmp_path / "some.json"
    icd.write_text('{"ICD": {"library_path": "libsome.so"}}')
    file = Path("/dev/full")
    if not file.exists():
        pytest.skip("no device that is always full")
    arguments = ["--json", str(file), "--library", "numpy", "--only", "matmul 8", "--driver", str(icd), "--rounds", "1"]
    assert suite.main(arguments) == 2
    told = capsys.readouterr()
    assert "matmul 8" in told.out and "numpy" in told.out
    assert "--json /dev/full could not be written: No space left on device" in told.err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Works and libraries, without a device."""
    assert suite.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*works.DEFAULT, *environments.PEERS))
