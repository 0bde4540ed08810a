"""Options from the command line and from config files, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from vkfold.engine.errors import BadInputError
from vkfold.tools.options import flag, parse_bytes, parse_options
from vkfold.tools.run_config import FREE_ON_RESUME, RunConfig, check_config, resumed_config

ISSUE_NAMES = (
    "--seq-len --stride --batch-size --accum-steps --epochs --max-steps --d-model --num-heads --num-kv-heads "
    "--num-layers --d-ff --norm --activation --positions --tie-head --dropout --optimizer --lr --beta1 --beta2 "
    "--weight-decay --max-norm --lr-schedule --warmup-steps --min-lr --seed --checkpoint-every --log-interval "
    "--eval-interval --save --save-interval --resume --sample --engine --device --log-file --config --keep --glob "
    "--tokenizer"
)


def parse(*argv: str) -> tuple[RunConfig, set[str]]:
    config, given = parse_options(RunConfig, argv, "text_train", "")
    check_config(config)
    return config, given


def test_every_promised_option_exists() -> None:
    names = {flag(field.name) for field in dataclasses.fields(RunConfig)}
    assert set(ISSUE_NAMES.split()) <= names


def test_command_line() -> None:
    config, given = parse("a.txt", "--lr", "0.5", "b.txt", "--tie-head", "--d-model=64", "-")
    assert config.inputs == ["a.txt", "b.txt", "-"]
    assert (config.lr, config.tie_head, config.d_model, config.seq_len) == (0.5, True, 64, 128)
    assert given == {"inputs", "lr", "tie_head", "d_model"}
    assert parse()[1] == set()
    assert parse("--no-tie-head")[0].tie_head is False


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_config_file_and_command_line_wins(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"run.{kind}"
    if kind == "toml":
        path.write_text('inputs = "x.txt"\nseq-len = 32\nlr = 1\ntie_head = true\nd_model = 32\n')
    else:
        path.write_text('{"inputs": ["x.txt"], "seq_len": 32, "lr": 1, "tie-head": true, "d_model": 32, "d_ff": null}')
    config, given = parse("--config", str(path), "--d-model", "64")
    assert (config.inputs, config.seq_len, config.lr, config.tie_head) == (["x.txt"], 32, 1.0, True)
    assert config.d_model == 64
    assert {"inputs", "seq_len", "lr", "tie_head", "d_model"} <= given
    assert parse("y.txt", "--config", str(path))[0].inputs == ["y.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_length = 3", "did you mean seq_len"),
        ("zzz = 3", "unknown name 'zzz'"),
        ('seq_len = "3"', "must be a whole number"),
        ("seq_len = true", "must be a whole number"),
        ("seq_len = 1.5", "must be a whole number"),
        ('lr = "fast"', "must be a number"),
        ("tie_head = 1", "must be true or false"),
        ("inputs = 3", "a text or a list"),
        ("inputs = [3]", "a text or a list"),
        ("seq_len = 0", "--seq-len 0 must be greater than 0"),
        ("lr = nan", "not a finite number"),
        ("lr = inf", "not a finite number"),
        ('norm = "batch"', "choose from rmsnorm, layernorm"),
        ("seq_len =", "is not valid"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=message):
        parse("--config", str(path))


def test_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read the config file"):
        parse("--config", str(tmp_path / "absent.toml"))
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(BadInputError, match="names and values"):
        parse("--config", str(tmp_path / "list.json"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="not valid"):
        parse("--config", str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-layer 3", "did you mean --num-layers"),
        ("--learning-rate 3", "unknown option --learning-rate"),
        ("--seq-len x", "invalid int value"),
        ("--seq-len", "expected one argument"),
        ("--seq-len -3", "--seq-len -3 must be greater than 0"),
        ("--stride 0", "--stride 0 must be"),
        ("--dropout 1", "--dropout 1.0 must be at least 0 and less than 1"),
        ("--lr nan", "not a finite number"),
        ("--norm batch", "invalid choice"),
        ("--engine cuda", "invalid choice"),
        ("--d-model 100 --num-heads 7", "does not divide --d-model 100: the nearest that does is 5"),
        ("--d-model 64 --num-heads 128", "does not divide"),
        ("--num-heads 4 --num-kv-heads 3", "--num-kv-heads 3 does not divide --num-heads 4"),
        ("--d-model 12 --num-heads 4", "head_dim 3 .* is odd"),
        ("--min-lr 1", "--min-lr 1 is more than"),
        ("--recompute mlp,nrom", "--recompute nrom: choose from"),
        ("--memory-budget 4XB", "'4XB' is no number of bytes: write 4GB"),
        ("--memory-budget 0", "no number of bytes"),
        ("--memory-budget -1GB", "expected one argument|no number of bytes"),
        ("--memory-budget 4GB --recompute mlp", "leave out --checkpoint-every and --recompute"),
        ("--memory-budget 4GB --checkpoint-every 1", "leave out"),
        ("--recompute-blocks 2", "--recompute-blocks needs --recompute"),
        ("--memory-timeline x --engine cpu", "needs --engine vulkan"),
        ("--keep 2", "--keep needs --save"),
        ("--save-interval 2", "--save-interval needs --save"),
        ("--tokenizer bpe --vocab-size 100", "at least 256"),
        (f"--seed {2**64}", "less than 2"),
    ],
)
def test_refused(argv: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse(*argv.split())


def test_odd_head_dim_is_fine_with_learned_positions() -> None:
    assert parse("--d-model", "12", "--num-heads", "4", "--positions", "learned")


def test_resume_takes_the_saved_options() -> None:
    saved = dataclasses.asdict(parse("x.txt", "--d-model", "64", "--max-steps", "40", "--seed", "9")[0])
    config, given = parse("--resume", "runs", "--max-steps", "80", "--checkpoint-every", "1", "--d-model", "64")
    result = resumed_config(config, given, saved)
    assert (result.d_model, result.seed, result.max_steps, result.checkpoint_every) == (64, 9, 80, 1)
    assert (result.inputs, result.resume) == (["x.txt"], "runs")


def test_resume_takes_the_newest_word_on_recomputation() -> None:
    def resumed(saved: str, *now: str) -> RunConfig:
        config, given = parse("--resume", "runs", *now)
        return resumed_config(config, given, dataclasses.asdict(parse("x.txt", *saved.split())[0]))

    result = resumed("--memory-budget 4GB", "--recompute", "mlp")
    assert (result.memory_budget, result.recompute) == (None, "mlp")
    result = resumed("--recompute mlp --recompute-blocks 2", "--memory-budget", "4GB")
    assert (result.memory_budget, result.recompute, result.recompute_blocks) == ("4GB", "", None)
    result = resumed("--recompute mlp --recompute-blocks 2 --activation-offload --memory-timeline t")
    assert (result.recompute_blocks, result.activation_offload, result.memory_timeline) == (2, True, None)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), ("1500000000", 1_500_000_000), ("2kB", 2000)],
)
def test_parse_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_resume_refuses_another_model() -> None:
    saved = dataclasses.asdict(parse("x.txt", "--d-model", "64")[0])
    config, given = parse("--resume", "runs", "--d-model", "128")
    with pytest.raises(BadInputError, match="cannot resume with --d-model 128: the save was made with 64"):
        resumed_config(config, given, saved)
    config, given = parse("--resume", "runs")
    with pytest.raises(BadInputError, match="unknown here: wings"):
        resumed_config(config, given, saved | {"wings": 2})


def test_free_options_are_options() -> None:
    assert {field.name for field in dataclasses.fields(RunConfig)} >= FREE_ON_RESUME
