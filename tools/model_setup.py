"""The engine, the model and the optimizer that the options of a run ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.compute_engine import ComputeEngine
from ..engine.cpu_engine import CpuEngine
from ..engine.errors import BadInputError
from ..engine.host_memory import available_bytes
from ..engine.vulkan_engine import VulkanEngine
from ..nn.gpt_config import GPTConfig
from ..nn.gpt_model import GPTModel
from ..nn.optimizers import SGD, Adafactor, AdamW, Optimizer
from ..nn.schedules import Schedule
from ..nn.training_step import TrainingStep
from .run_config import RunConfig, recompute_groups
from .saves import Arrays


def make_engine(name: str, device: str | None) -> ComputeEngine:
    """The engine called "cpu" or "vulkan". Raises VulkanUnavailableError or BadInputError where there is none."""
    if name == "cpu":
        if device is not None:
            raise BadInputError("--device chooses a Vulkan device; leave it out with --engine cpu")
        return CpuEngine()
    return VulkanEngine(device)


def budget_bytes(engine: ComputeEngine) -> int:
    """How many bytes the run may take on the engine's device."""
    return engine.source.budget_bytes if isinstance(engine, VulkanEngine) else available_bytes()


def gpt_config(config: RunConfig, vocab_size: int) -> GPTConfig:
    """The model's sizes and parts. Raises BadInputError when they do not fit together."""
    return GPTConfig(
        vocab_size=vocab_size,
        max_seq_len=config.seq_len,
        d_model=config.d_model,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads or 0,
        d_ff=config.d_ff or 0,
        norm=config.norm,
        activation=config.activation,
        positions=config.positions,
        window=config.attention_window,
        attention_softcap=config.attention_softcap,
        attention_sinks=config.attention_sinks,
        tie_head=config.tie_head,
        dropout=config.dropout,
    )


def make_model(engine: ComputeEngine, config: RunConfig, vocab_size: int, weights: Arrays | None = None) -> GPTModel:
    """The model with fresh weights from the seed, or with the given ones.

    Raises BadInputError when the weights are another model's.
    """
    seed = config.seed if weights is None else None
    model = GPTModel(engine, gpt_config(config, vocab_size), seed=seed, loss_chunk_bytes=config.loss_chunk_bytes)
    if weights is not None:
        try:
            model.load_state_dict(weights)
        except ValueError as error:
            raise BadInputError(f"the saved weights are of another model: {error}") from error
    model.set_checkpoint_every(config.checkpoint_every)
    model.set_recompute(recompute_groups(config), config.recompute_blocks)
    model.set_activation_offload(config.activation_offload)
    model.set_flush_interval(config.flush_interval)
    return model


def make_optimizer(model: GPTModel, config: RunConfig, moments: Arrays | None = None) -> Optimizer:
    """The optimizer, with zero moments or the given ones. Raises BadInputError when they are another model's."""
    optimizer: Optimizer
    if config.optimizer == "adamw":
        optimizer = AdamW(
            model, learning_rate=config.lr, beta1=config.beta1, beta2=config.beta2, weight_decay=config.weight_decay
        )
    elif config.optimizer == "adafactor":
        optimizer = Adafactor(model, learning_rate=config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = SGD(model, learning_rate=config.lr, momentum=config.beta1, weight_decay=config.weight_decay)
    if moments is not None:
        try:
            optimizer.load_state_dict(moments)
        except ValueError as error:
            raise BadInputError(f"the saved moments are of another model or optimizer: {error}") from error
    return optimizer


def make_training_step(
    model: GPTModel,
    optimizer: Optimizer,
    config: RunConfig,
    on_phase: Callable[[str, int], None] | None = None,
    on_pools: Callable[[str, int, dict[str, Any]], None] | None = None,
) -> TrainingStep:
    """One optimizer step as the options say."""
    return TrainingStep(
        model,
        optimizer,
        max_norm=config.max_norm,
        seed=config.seed,
        on_phase=on_phase,
        on_pools=on_pools,
        fused_update=config.fused_update,
    )


def make_schedule(config: RunConfig, num_steps: int) -> Schedule:
    """The learning rate over the run's steps. Raises BadInputError for a warm-up longer than a cosine's span."""
    horizon = config.schedule_steps or num_steps
    return Schedule(config.lr_schedule, config.lr, config.warmup_steps, horizon, config.min_lr)
