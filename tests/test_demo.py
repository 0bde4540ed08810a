"""The demo in short: the same program with few steps, which cannot reach its goal and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vkfold.tools import demo, text_train


def test_demo_text_is_real() -> None:
    text = demo.demo_text()
    assert len(text) > 200_000
    assert "The " in text


def test_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    argv = ["--folder", str(folder), "--engine", "cpu", "--steps"]
    assert demo.main([*argv, "12"]) == 1
    shown = capsys.readouterr()
    assert "the model did not reach 2.000 nats/byte" in shown.err
    loss = re.search(r"^held-out loss (\d+\.\d{3}) nats/byte$", shown.out, re.MULTILINE)
    bigram = re.search(r"bigram model, same text: (\d\.\d{3}) nats/byte", shown.out)
    assert loss
    assert bigram
    assert 2.0 < float(loss[1]) < 5.5
    assert 2.1 < float(bigram[1]) < 2.5
    assert "sample of 400 tokens" in shown.out
    resume = re.search(r"text_train (--resume .*) --max-steps 24$", shown.out, re.MULTILINE)
    assert resume
    assert text_train.main([*resume[1].split(), "--max-steps", "13"]) == 0
    assert demo.main([*argv, "2"]) == 1  # an earlier demo is in no one's way
    assert sorted(p.name for p in (folder / "saves").glob("step-*")) == ["step-00000002"]
