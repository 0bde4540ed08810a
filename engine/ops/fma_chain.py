"""A probe of arithmetic: chains of fused multiply-adds on values in registers. What a device can do at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_LOCAL_SIZE = 64
PER_LANE = 32  # chains a lane, independent of each other, so that the latency of one is hidden behind the others
MAX_ROUNDS = 2**15  # lavapipe 22.3 ends loops after 65,535 rounds

_TEXT = """
void main() {
    const uint lane = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (lane >= args.num_lanes) return;
    const uint i = lane * 8u;
    vec4 a = args.x.v[i], b = args.x.v[i + 1u], c = args.x.v[i + 2u], d = args.x.v[i + 3u];
    vec4 e = args.x.v[i + 4u], f = args.x.v[i + 5u], g = args.x.v[i + 6u], h = args.x.v[i + 7u];
    const vec4 factor = vec4(args.factor), term = vec4(args.term);
    for (uint round = 0; round < args.rounds; ++round) {
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        e = fma(e, factor, term); f = fma(f, factor, term); g = fma(g, factor, term); h = fma(h, factor, term);
    }
    args.y.v[i] = a; args.y.v[i + 1u] = b; args.y.v[i + 2u] = c; args.y.v[i + 3u] = d;
    args.y.v[i + 4u] = e; args.y.v[i + 5u] = f; args.y.v[i + 6u] = g; args.y.v[i + 7u] = h;
}
"""

KERNEL = Kernel(
    "fma_chain",
    _TEXT,
    "in f32x4 x, out f32x4 y, uint num_lanes, uint rounds, float factor, float term",
    local_size=_LOCAL_SIZE,
)


class FmaChainOp(Op):
    """y = x after `rounds` times x = x * factor + term."""

    name = "fma_chain"

    def outputs(self, x: TensorSpec, *, rounds: int, factor: float, term: float) -> Sequence[TensorSpec]:
        if x.dtype != "float32" or x.size % PER_LANE or not x.size:
            raise ValueError(f"fma_chain: x is {x.dtype} {x.shape}, needed are float32 and a multiple of {PER_LANE}")
        if not 0 <= rounds <= MAX_ROUNDS:
            raise ValueError(f"fma_chain: rounds is {rounds}, it must be 0 to {MAX_ROUNDS}")
        return (x,)

    def flops(self, x: TensorSpec, *, rounds: int, factor: float, term: float) -> int:
        return 2 * rounds * x.size

    def reference(self, x: Any, *, rounds: int, factor: float, term: float) -> Sequence[Any]:
        y = x.copy()
        for _ in range(rounds):
            y = y * x.dtype.type(factor) + x.dtype.type(term)
        return (y,)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        rounds: int,
        factor: float,
        term: float,
    ) -> None:
        lanes = inputs[0].size // PER_LANE
        gpu.dispatch(KERNEL, -(-lanes // _LOCAL_SIZE), inputs[0], outputs[0], lanes, rounds, factor, term)

    def kernels(self) -> Iterable[Kernel]:
        return (KERNEL,)


FMA_CHAIN = register(FmaChainOp())


def fma_chain(engine: ComputeEngine, x: Tensor, *, rounds: int, factor: float = 0.999, term: float = 0.001) -> Tensor:
    """x after `rounds` fused multiply-adds x = x * factor + term, each element by itself; float32, any shape whose size
    is a multiple of 32. Raises ValueError for another size or type, or more than 32,768 rounds.
    """
    return engine.execute(FMA_CHAIN, (x,), rounds=rounds, factor=factor, term=term)[0]
