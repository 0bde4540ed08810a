"""text_train: train a transformer on text files, on any Vulkan device."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from ..engine.switches import cache_folder
from ..nn.sampling import Sampler
from .budget_option import within_memory_budget
from .console import run_program
from .generation import generate_bytes
from .memory_report import size
from .memory_timeline import MemoryTimeline, check_timeline
from .model_setup import budget_bytes, gpt_config, make_engine, make_model, make_optimizer, make_schedule
from .options import parse_options
from .progress import check_log
from .run_config import RunConfig, check_config, resumed_config
from .run_state import RunState
from .saves import Save, check_disk_space, check_save_folder, lock_save_folder, open_save
from .size_check import MANY_BLOCKS, check_budget, planned_save_bytes
from .text_data import ShuffledWindows
from .training_data import TrainingData, check_windows, copy_tokens, new_data, resumed_data
from .training_run import Outcome, TrainingRun

DESCRIPTION = """Train a decoder-only transformer on text. One command: text_train my_text.txt --save run.
Every option can also stand in a TOML or JSON file given with --config."""


def _program(argv: Sequence[str]) -> int:
    config, given = parse_options(RunConfig, argv, "text_train", DESCRIPTION)
    train(config, given)
    return 0


def train(config: RunConfig, given: set[str]) -> Outcome:
    """One run as the options say. given: names of the options that were set, as opposed to left at their defaults.

    All that can be wrong with options, files and saves is found before the device is touched, then whether the run fits
    its memory. Raises BadInputError, VulkanUnavailableError, NonFiniteError.
    """
    with ExitStack() as stack:
        save, state = None, None
        if config.resume is not None:
            config.resume = config.resume or config.save
            if config.resume is None:
                raise BadInputError("--resume from where? Give it a folder of saves, or give --save")
            save = open_save(Path(config.resume))
            state = RunState.of(save)
            config = resumed_config(config, given, state.config)
        else:
            check_config(config)
        root = _save_folder(config, save, given, stack)
        if config.log_file is not None:
            check_log(Path(config.log_file), fresh=save is None)
        if config.memory_timeline is not None:
            check_timeline(config.memory_timeline)
        data = _data(config, given, save, root, stack)
        warnings = check_windows(config, given, data, fresh=save is None)
        vocab_size = data.tokenizer.vocab_size
        gpt_config(config, vocab_size)
        num_steps = _num_steps(config, data, state)
        schedule = make_schedule(config, num_steps) if state is None else state.make_schedule()
        weights, moments = (None, None) if save is None else (save.model(), save.optimizer())

        if save is not None and num_steps < save.step:
            raise BadInputError(
                f"{save.folder} is already at step {save.step}, beyond the {num_steps} asked for: raise --max-steps"
            )
        if config.num_layers >= MANY_BLOCKS:
            print(f"text_train: planning the memory of {config.num_layers:,} blocks", file=sys.stderr, flush=True)
        chosen, within = within_memory_budget(config, vocab_size)
        if weights is not None:  # names and shapes, on an engine that needs no device
            make_optimizer(make_model(PlanEngine(), chosen, vocab_size, weights), chosen, moments)
        engine = stack.enter_context(make_engine(config.engine, config.device))
        peak = check_budget(chosen, vocab_size, budget_bytes(engine), automatic=within is not None)
        if root is not None:
            check_disk_space(root, planned_save_bytes(chosen, vocab_size))
        timeline = None if config.memory_timeline is None else MemoryTimeline(engine, Path(config.memory_timeline))
        model = make_model(engine, chosen, vocab_size, weights)
        optimizer = make_optimizer(model, config, moments)
        del weights, moments
        windows = ShuffledWindows(len(data.train), config.seed) if state is None else state.make_windows()
        step = 0 if save is None else save.step
        run = TrainingRun(
            *(config, data, model, optimizer, schedule, windows),
            step=step,
            num_steps=num_steps,
            root=root,
            timeline=timeline,
        )
        for warning in warnings:
            print(f"text_train: warning: {warning}", file=sys.stderr, flush=True)
        print(
            f"{data.num_bytes:,} bytes of text, {len(data.train):,} windows to train on, {len(data.held_out):,} held "
            f"out; {model.num_parameters:,} parameters on {engine.name}; about {size(peak)} at the peak",
            flush=True,
        )
        if within is not None:
            print(f"--memory-budget {config.memory_budget} asks for: {within.mode}", flush=True)
        if save is not None:
            print(f"resumed from {save.folder} at step {step}", flush=True)
        outcome = run.run()
        _report(outcome, run)
        return outcome


def _save_folder(config: RunConfig, save: Save | None, given: Collection[str], stack: ExitStack) -> Path | None:
    """Where this run's saves go: --save where it is given, else the folder it resumes from, wherever that was moved.

    The folder is this run's alone until the stack is closed.
    """
    if save is None:
        if config.save is None:
            return None
        check_save_folder(Path(config.save), resuming=False)
        stack.enter_context(lock_save_folder(Path(config.save)))
        check_save_folder(Path(config.save), resuming=False)  # a run that ended meanwhile may have saved
        return Path(config.save)
    source = save.folder.parent
    target = Path(config.save) if config.save is not None and "save" in given else source
    same = target.resolve() == source.resolve()
    check_save_folder(target, resuming=same)
    stack.enter_context(lock_save_folder(target))
    config.save = str(target)
    return target


def _data(config: RunConfig, given: set[str], save: Save | None, root: Path | None, stack: ExitStack) -> TrainingData:
    if save is None and root is not None:
        return new_data(config, root)
    scratch = _scratch_folder(stack)
    if save is None:
        return new_data(config, scratch)
    data = resumed_data(config, save, scratch, inputs_given="inputs" in given)
    if root is not None and "inputs" in given:  # the tokens there may be missing or damaged
        copy_tokens(scratch, root)
    elif root is not None and root.resolve() != save.folder.parent.resolve():
        copy_tokens(save.folder.parent, root)
    return data


def _scratch_folder(stack: ExitStack) -> Path:
    """A folder for this run's tokens, in the cache folder where that can be written; gone when the run is over."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="tokens-", dir=cache_folder(), ignore_cleanup_errors=True)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="vkfold-tokens-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(folder))


def _num_steps(config: RunConfig, data: TrainingData, state: RunState | None) -> int:
    """Steps of the whole run. The last epoch is filled up to a whole step from the next one."""
    if config.max_steps is not None:
        return config.max_steps
    if state is not None and config.epochs == state.config.get("epochs"):
        return state.num_steps
    per_step = config.batch_size * config.accum_steps
    return -(-config.epochs * len(data.train) // per_step)


def _report(outcome: Outcome, run: TrainingRun) -> None:
    if outcome.stopped_by is not None:
        print(f"stopped by {outcome.stopped_by} after step {outcome.step} of {run.num_steps}")
    stats = run.engine.replay_stats()
    if stats.replayed:
        print(f"{stats.replayed:,} of {stats.recorded + stats.replayed:,} steps were replayed, the others recorded")
    if outcome.held_out_loss is not None:
        print(f"held-out loss {outcome.held_out_loss:.3f} nats/byte")
    if run.config.sample and outcome.stopped_by is None:
        sampler = Sampler(seed=run.config.seed, temperature=0.8, vocab_size=run.data.tokenizer.vocab_size)
        prompt = run.config.prompt.encode("utf-8", errors="surrogateescape")
        made = b"".join(generate_bytes(run.model, run.data.tokenizer, prompt, run.config.sample, sampler))
        text = (prompt + made).decode("utf-8", errors="replace")
        print(f"--- sample of {run.config.sample} tokens ---\n{text}\n---")
    if run.root is not None:
        last = outcome.last_save or "the save it was resumed from"
        print(f"saved in {last}; go on with: text_train --resume {run.root}")
    elif outcome.stopped_by is not None:
        print("nothing was saved: give a folder with --save")


def main(argv: Sequence[str] | None = None) -> int:
    """The program: runs on the arguments (the command line's when None), prints errors, returns the exit code."""
    return run_program("text_train", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
