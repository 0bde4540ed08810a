"""Global norm of all gradients: sums of squares a tensor, clip factor and a flag that says whether all is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..input_checks import described, require_list
from ..kernel import Kernel
from ..op import register
from ..setting_checks import is_number
from ..tensor import Tensor, TensorSpec
from .loop_kernels import LoopCall, LoopOp, OfTensors, by_loops, every_text, launch_loops, planned, rows_by_loops
from .row_kernels import ROW_SUBGROUPS, check_dtype_of, check_spec, row_groups
from .sum import PARTS_ARGS, parts_of
from .tensor_table import SQUARES_WORDS, Place, check_count, own_table, squares_table, table_spec, write_table

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

NORM_EPS = 1e-6  # keeps the clip factor finite for a norm of 0
SMALL = 2.0**-96  # shaders/squares.glsl
_MOST, _LEAST = 1e18, 2.0**-126  # shaders/gradient_state.comp
_MIN_CHUNK = 8192  # elements
_MAX_PARTS = 8192


def _squares_many(turns: int) -> Kernel:
    return Kernel(
        "square_sums_many",
        "square_sums_many.comp",
        "in u32x4 table, out f32 y, uint num_tensors, uint num_parts",
        subgroups=ROW_SUBGROUPS,
        defines={"TURNS": turns},
        family="loop",
    )


def _prepare(
    aside: Recorder, kernel: Kernel, turns: int, rows: Sequence[Sequence[Place]], more: int
) -> Callable[[], None]:
    """Tensors of a case or a measurement; more: where the sums of their parts go."""
    parts = [square_parts(place.size) for (place,) in rows]
    table = own_table(aside, squares_table([place for (place,) in rows], parts))
    num_parts = sum(count for count, _ in parts)
    groups = row_groups(aside, kernel, num_parts)
    return lambda: aside.dispatch(kernel, groups, table, more, len(rows), num_parts)


SQUARES = rows_by_loops("square_sums", "square_sums.comp", PARTS_ARGS, parts_of, subgroups=ROW_SUBGROUPS)
SQUARES_MANY = by_loops(_squares_many, OfTensors(1, _prepare))
ONE_SUM = Kernel(
    "gradient_sum",
    "gradient_sums.comp",
    "in f32 partials, out f32 sums, uint parts",
    subgroups=1,
    defines={"TABLE": 0},
)
TENSOR_SUMS = Kernel(
    "gradient_sums",
    "gradient_sums.comp",
    "in u32x4 table, in f32 partials, out f32 sums, uint num_tensors",
    subgroups=ROW_SUBGROUPS,
    defines={"TABLE": 1},
)
STATE = Kernel(
    "gradient_state",
    "gradient_state.comp",
    "in f32 sums, in f32 loss, out f32 state, uint num_tensors, uint has_loss, float max_norm, float eps",
    local_size=1,
)


@lru_cache(maxsize=4096)
def square_parts(n: int) -> tuple[int, int]:
    """(parts, elements a part) of the first stage: a pure function of the size, since it fixes the order of the sum."""
    chunk = max(_MIN_CHUNK, 4 * -(-n // (4 * _MAX_PARTS)))
    return max(1, -(-n // chunk)), chunk


def squares_call(x: Tensor, target: Tensor) -> LoopCall:
    """The first stage for one tensor."""
    parts, chunk = square_parts(x.size)
    return LoopCall(SQUARES.pick(x.size, x), parts, min(x.size, chunk), (x, target), (x.size, parts, chunk))


class GradientNormOp(LoopOp):
    """Inputs: the loss (or None), then every gradient."""

    name = "gradient_norm"

    def outputs(self, loss: TensorSpec | None, *grads: TensorSpec, max_norm: float) -> Sequence[TensorSpec]:
        check_count(self.name, "gradients", len(grads))
        if not max_norm >= 0:
            raise ValueError(f"{self.name}: max_norm is {max_norm}, it must be 0 (no clipping) or positive")
        for i, grad in enumerate(grads):
            check_dtype_of(self.name, f"gradient {i}", grad, "float32")
        if loss is not None:
            check_spec(self.name, "loss", loss, (1,))
        return TensorSpec((len(grads),)), TensorSpec((4,))

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        parts = [square_parts(spec.size)[0] for spec in specs[1:] if spec is not None]
        made = [] if len(parts) == 1 else [table_spec(len(parts), SQUARES_WORDS)]
        if max(parts) > 1:
            made.append(TensorSpec((sum(parts),)))
        return made

    def flops(self, loss: TensorSpec | None, *grads: TensorSpec, max_norm: float) -> int:
        return 2 * sum(grad.size for grad in grads)

    def reference(self, loss: Any, *grads: Any, max_norm: float) -> Sequence[Any]:
        dtype = grads[0].dtype
        small = dtype.type(SMALL)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            sums = np.array([np.sum(np.square(grad)) for grad in grads], dtype=dtype)
            for i, grad in enumerate(grads):
                if np.isposinf(sums[i]) and np.isfinite(grad).all():
                    sums[i] = -np.sum(np.square(grad * small))
            total = np.cumsum(sums)[-1]
            beyond = bool((sums < 0).any() or np.isposinf(total))
            norm = np.sqrt(total)
            if beyond:
                norm = np.sqrt(np.cumsum(np.where(sums < 0, -sums, sums * small * small))[-1]) / small
        last = loss[0] if loss is not None else norm.dtype.type(0)
        clip = min(1.0, max_norm / float(norm + NORM_EPS)) if max_norm > 0 else 1.0
        clipped = 0 < max_norm <= _MOST and clip >= _LEAST
        finite = bool(np.isfinite(norm) and np.isfinite(last) and (clipped or not beyond))
        return sums, np.array([clip if finite else 0.0, float(finite), norm, last], dtype=sums.dtype)

    def loop_calls(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], **_: Any) -> Sequence[LoopCall]:
        grads = [grad for grad in inputs[1:] if grad is not None]
        parts = [square_parts(grad.size) for grad in grads]
        num_parts = sum(count for count, _ in parts)
        partials = outputs[-1] if num_parts > len(grads) else outputs[0]
        if len(grads) == 1:
            return (squares_call(grads[0], partials),)
        length = sum(grad.size for grad in grads) // num_parts
        return (LoopCall(SQUARES_MANY, num_parts, length, [(grad,) for grad in grads]),)

    def launch(
        self, gpu: Recorder, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], *, max_norm: float
    ) -> None:
        loss, *given = inputs
        grads = [grad for grad in given if grad is not None]
        sums, state = outputs[:2]
        (call,) = self.loop_calls(inputs, outputs)
        num_parts = call.pieces
        partials = outputs[-1] if num_parts > len(grads) else sums
        # The recorder splits by the op's work: it is all in the first stage.
        work = gpu.op_work
        if len(grads) == 1:
            launch_loops(gpu, call)
            gpu.op_work = 0.0
            if num_parts > 1:
                gpu.dispatch(ONE_SUM, 1, partials, sums, num_parts)
        else:
            table = outputs[2]
            write_table(gpu, table, squares_table(grads, [square_parts(grad.size) for grad in grads]))
            plan = planned(gpu, *call[:3])
            gpu.dispatch(plan.kernel, -(-num_parts // plan.a_group), table, partials, len(grads), num_parts)
            gpu.op_work = 0.0
            if partials is not sums:
                groups = row_groups(gpu, TENSOR_SUMS, len(grads))
                gpu.dispatch(TENSOR_SUMS, groups, table, partials, sums, len(grads))
        has_loss = loss is not None
        gpu.dispatch(STATE, 1, sums, loss if has_loss else sums, state, len(grads), int(has_loss), max_norm, NORM_EPS)
        gpu.op_work = work

    def kernels(self) -> Iterable[Kernel]:
        return (*every_text((*SQUARES.both(), SQUARES_MANY)), ONE_SUM, TENSOR_SUMS, STATE)


GRADIENT_NORM = register(GradientNormOp())


def gradient_norm(
    engine: ComputeEngine, grads: Sequence[Tensor], loss: Tensor | None = None, *, max_norm: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sums [n], state [4]) of n float32 gradients of any shapes; nothing is read back, optimizer ops read the state.

    sums: sum of squares of each gradient; inf or NaN where an element is not finite; where all are and their sum of
    squares is beyond float32 (a norm above about 1.8e19), minus that sum times 2^-192. state: [clip factor, 1 when all
    gradients and the loss are finite else 0, global norm, loss or 0]. The clip factor is min(1, max_norm / (norm +
    1e-6)) (Pascanu et al. 2013), 1 with max_norm 0, and 0 when something is not finite. A norm beyond 1.8e19 counts as
    not finite unless it is clipped to at most 1e18, by a factor of at least 2^-126: an optimizer squares what is left.
    Each tensor is summed in an order that depends on its size and the device's subgroup size alone, then the sums in
    the order given.

    Raises ValueError for no gradient, another element type, a loss that is not [1], or a negative max_norm.
    """
    require_list("gradient_norm", "grads", grads)
    sums, state = engine.execute(GRADIENT_NORM, (loss, *grads), max_norm=_number(max_norm))
    return sums, state


def _number(value: float) -> float:
    if not is_number(value):
        raise TypeError(f"gradient_norm: max_norm is {described(value)}, needed is a number")
    return math.inf if value > 3.4e38 else float(value)  # push constants are float32
