"""What generating text takes: weights, the cache of keys and values, and the temporaries of one pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from ..nn.gpt_config import GPTConfig
from ..nn.gpt_model import GPTModel
from .several_cards import check_tensor_parallel, local_kv_heads, parameter_share

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass
class InferencePlan:
    """Bytes on each of tensor_parallel cards. workspace_bytes: the rest of one sequence's pass over its prompt.

    largest_batch: sequences of seq_len tokens that fit card_bytes, None where that was not given.
    """

    dtype: str
    batch_size: int
    seq_len: int
    tensor_parallel: int
    weight_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int
    largest_batch: int | None

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the whole batch."""
        return self.kv_bytes_per_token * self.seq_len * self.batch_size

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes


def kv_bytes_per_token(model: GPTConfig, dtype: str = "float16", tensor_parallel: int = 1) -> int:
    """Bytes of one token's keys and values in all layers, on one card."""
    return 2 * model.num_layers * local_kv_heads(model, tensor_parallel) * model.head_dim * ITEM_BYTES[dtype]


def plan_inference(
    model: GPTConfig,
    *,
    batch_size: int,
    seq_len: int,
    dtype: str = "float32",
    tensor_parallel: int = 1,
    card_bytes: int | None = None,
) -> InferencePlan:
    """Plan generation. The workspace is planned by the model's own code in float32 on one card, and scaled.

    dtype: of weights, keys and values; vkfold itself computes in float32. Raises BadInputError for a tensor_parallel
    that does not divide the heads and the feed-forward, and for sizes no engine can hold.
    """
    check_tensor_parallel(model, tensor_parallel)
    engine = PlanEngine()
    try:
        gpt = GPTModel(engine, model)
        gpt.logits_last(np.zeros((1, seq_len), np.int32))
    except BadInputError:
        raise
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    weights = sum(
        parameter.size * parameter_share(model, name, tensor_parallel)
        for name, parameter in gpt.named_parameters().items()
    )
    weight_bytes = round(weights * ITEM_BYTES[dtype])
    per_token = kv_bytes_per_token(model, dtype, tensor_parallel)
    workspace = engine.pool_stats()["step"].peak_live_bytes * ITEM_BYTES[dtype] // 4
    largest = None
    if card_bytes is not None:
        largest = max(0, card_bytes - weight_bytes - workspace) // (per_token * seq_len)
    return InferencePlan(dtype, batch_size, seq_len, tensor_parallel, weight_bytes, per_token, workspace, largest)
