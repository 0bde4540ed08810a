"""What one card of several holds: ZeRO's stages over data-parallel cards, and tensor parallelism, from one ledger.

ZeRO: Rajbhandari et al. 2020. Stage 1 spreads optimizer states over the cards, 2 gradients too, 3 parameters too.
Tensor parallel: Shoeybi et al. 2019, "Megatron-LM": heads, feed-forward columns and vocabulary are spread; norms,
biases of row-parallel matrices, learned positions and the residual stream are whole on every card.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.allocation_ledger import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, PARAMETERS, RECOMPUTED, Allocation
from ..engine.errors import BadInputError
from ..nn.gpt_config import GPTConfig
from .memory_plan import TrainingPlan

_SPREAD_FROM_STAGE = {OPTIMIZER: 1, GRADIENTS: 2, PARAMETERS: 3}


def _zero_divisor(kind: str, cards: int, stage: int) -> int:
    return cards if stage >= _SPREAD_FROM_STAGE.get(kind, 4) else 1


def qkv_share(model: GPTConfig, tensor_parallel: int) -> float:
    """Part of q, k and v on one card: key/value heads are doubled where there are fewer of them than cards."""
    local = model.num_heads / tensor_parallel + 2 * local_kv_heads(model, tensor_parallel)
    return local / (model.num_heads + 2 * model.num_kv_heads)


def local_kv_heads(model: GPTConfig, tensor_parallel: int) -> int:
    """Key/value heads a card holds."""
    return -(-model.num_kv_heads // tensor_parallel)


def check_tensor_parallel(model: GPTConfig, tensor_parallel: int) -> None:
    """Raises BadInputError for a number of cards that does not divide the heads and the feed-forward."""
    for name, size in (("--num-heads", model.num_heads), ("--d-ff", model.d_ff)):
        if size % tensor_parallel:
            raise BadInputError(f"--tensor-parallel {tensor_parallel} does not divide {name} {size}")


def parameter_share(model: GPTConfig, name: str, tensor_parallel: int) -> float:
    """Part of a parameter (or of its gradient or moments) that one tensor-parallel card holds."""
    if "attention.qkv." in name:
        return qkv_share(model, tensor_parallel)
    spread = ("attention.out.weight", "feed_forward.up.", "feed_forward.down.weight", "embedding.weight")
    if name.endswith("head") or any(part in name for part in spread):
        return 1 / tensor_parallel
    return 1.0


@dataclass
class CardPlan:
    """One card's part. states_bytes: parameters, gradients and optimizer states when all are there; peak_bytes: most
    live at once, with gathered_bytes: the whole parameters of the layer at work that stage 3 brings together."""

    cards: int
    zero_stage: int
    tensor_parallel: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    peak_bytes: int

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def plan_card(plan: TrainingPlan, *, cards: int = 1, zero_stage: int = 0, tensor_parallel: int = 1) -> CardPlan:
    """What one of cards * tensor_parallel cards holds. The batch of the plan is that of one data-parallel card.

    A gradient counts as spread from its birth on, and temporaries whose shape does not tell are counted whole, so the
    peak is an upper bound but for the buckets in which a program would send gradients.
    Raises BadInputError for a tensor_parallel that does not divide the heads and the feed-forward.
    """
    model = plan.model
    check_tensor_parallel(model, tensor_parallel)
    ledger = plan.ledger
    shares = {
        id(a): _share(model, a, tensor_parallel) / _zero_divisor(a.kind, cards, zero_stage) for a in ledger.allocations
    }
    most = {kind: round(ledger.curve(shares, kind).max(initial=0.0)) for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)}
    gathered = 0
    if zero_stage >= 3 and cards > 1:
        layers: dict[str, float] = {}
        for a in ledger.allocations:
            if a.kind == PARAMETERS:
                layer = ".".join(a.label.split(".")[:2])
                layers[layer] = layers.get(layer, 0.0) + a.nbytes * _share(model, a, tensor_parallel)
        gathered = round(max(layers.values()) * (1 - 1 / cards))
    peak = round(ledger.curve(shares)[ledger.step_event :].max()) + gathered
    return CardPlan(
        cards, zero_stage, tensor_parallel, most[PARAMETERS], most[GRADIENTS], most[OPTIMIZER], gathered, peak
    )


def _share(model: GPTConfig, allocation: Allocation, tensor_parallel: int) -> float:
    """Part of an allocation that one tensor-parallel card holds."""
    if tensor_parallel == 1:
        return 1.0
    kind, label = allocation.kind, allocation.label
    if kind in (PARAMETERS, GRADIENTS, OPTIMIZER):
        return parameter_share(model, label, tensor_parallel)
    if kind == LOGITS:
        return 1 / tensor_parallel
    if kind in (ACTIVATIONS, RECOMPUTED):
        if label.endswith("attention.qkv"):
            return qkv_share(model, tensor_parallel)
        spread = ("attention.o", "attention.lse", "feed_forward.pre")
        return 1 / tensor_parallel if label.endswith(spread) else 1.0
    columns = allocation.shape[-1] if allocation.shape else 0
    if columns == model.d_model:
        return 1.0
    if columns == (model.num_heads + 2 * model.num_kv_heads) * model.head_dim:
        return qkv_share(model, tensor_parallel)
    return 1 / tensor_parallel if columns in (model.d_ff, 2 * model.d_ff) else 1.0
