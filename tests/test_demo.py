"""The demo in short: the same program with few steps, which cannot reach its goal and says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vkfold.tools import demo, text_train


def test_demo_text_is_real() -> None:
    text = demo.demo_text()
    assert len(text) > 200_000
    assert "The " in text


@pytest.mark.slow
def test_the_demo_reaches_its_figures(tmp_path: Path) -> None:
    """As `./run demo` runs it, on the device: below 2.0 nats per byte of held-out text, and 0.3 below the bigrams."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "vkfold.tools.demo", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^held-out loss (\d+\.\d{3}) nats/byte$", done.stdout, re.MULTILINE)
    bigrams = re.findall(r"^bigram model, same text: (\d+\.\d{3}) nats/byte$", done.stdout, re.MULTILINE)
    assert len(losses) == len(bigrams) == 1
    assert float(losses[0]) < 2.0
    assert float(losses[0]) < float(bigrams[0]) - 0.3
    sample = done.stdout.split("--- sample of 400 tokens ---\n")[1].split("\n---\n")[0]
    assert sample.startswith("The ") and len(sample) > 300
    assert f"files: {folder}" in done.stdout
    assert re.search(r"^resume: .*text_train --resume .* --max-steps 1600$", done.stdout, re.MULTILINE)
    # The figure is that of the held-out tenth, by the log too, and the save is the one that was measured.
    lines = [json.loads(line) for line in (folder / "saves" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 800 and lines[-1]["held_out_loss_per_byte"] == pytest.approx(float(losses[0]), abs=6e-4)
    assert (folder / "saves" / "latest").read_text().strip() == "step-00000800"


@pytest.mark.deviceless
def test_few_steps(short_demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    argv = ["--folder", str(folder), "--engine", "cpu", "--steps"]
    assert demo.main([*argv, "6"]) == 1
    shown = capsys.readouterr()
    assert "the model did not reach 2.000 nats/byte" in shown.err
    loss = re.search(r"^held-out loss (\d+\.\d{3}) nats/byte$", shown.out, re.MULTILINE)
    bigram = re.search(r"bigram model, same text: (\d\.\d{3}) nats/byte", shown.out)
    assert loss
    assert bigram
    assert 2.0 < float(loss[1]) < 5.5
    assert 2.5 < float(bigram[1]) < 3.2
    assert "sample of 40 tokens" in shown.out
    resume = re.search(r"text_train (--resume .*) --max-steps 12$", shown.out, re.MULTILINE)
    assert resume
    assert text_train.main([*resume[1].split(), "--max-steps", "7"]) == 0
    assert demo.main([*argv, "2"]) == 1  # an earlier demo is in no one's way, and stays
    assert sorted(p.name for p in (folder / "saves").glob("step-*")) == ["step-00000006", "step-00000007"]
    assert sorted(p.name for p in (folder / "saves-2").glob("step-*")) == ["step-00000002"]
    assert "saved in " + str(folder / "saves-2" / "step-00000002") in capsys.readouterr().out


def test_the_transcript_in_the_readme(
    short_demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of it, but for numbers and places, is one that the demo prints, and in that order."""

    def plain(line: str) -> str:
        line = re.sub(r"(?<=^files: )\S*(?=demo-run )", "", line)
        line = re.sub(r"(?<=: )\S*(?=text_(train|generate) )", "", line)
        return re.sub(r"\d[\d,.:]*(e-\d+)?", "N", line)

    readme = (Path(demo.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    transcript = readme.split("$ ./run demo\n")[1].split("\n```")[0].splitlines()
    start = transcript.index("--- sample of 400 tokens ---")
    sample = range(start + 1, transcript.index("---"))
    expected = [plain(line) for i, line in enumerate(transcript) if line != "..." and i not in sample]
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--steps", "10"]) == 1
    printed = iter([plain(line) for line in capsys.readouterr().out.splitlines()])
    once = list(dict.fromkeys(expected))  # fewer steps have fewer held-out losses
    missing = [line for line in once if line not in printed]  # `in` goes on from the line it found
    assert not missing
