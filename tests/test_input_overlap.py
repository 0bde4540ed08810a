"""Inputs that share memory: what an op writes must not be what it reads elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from vkfold.engine import verbs  # noqa: F401  registers every op
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import variable
from vkfold.engine.fold import FoldSpec
from vkfold.engine.map_kernel import MapKernel
from vkfold.engine.op import OPS, Op
from vkfold.engine.ops.elementwise import MapOp
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.vulkan_engine import VulkanEngine

F, IDS, G = TensorSpec((6, 8)), TensorSpec((6,), "int32"), TensorSpec((6,))
COLS = TensorSpec((8,))
STATE = TensorSpec((4,))
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
IN_PLACE = FoldSpec("double_row", inputs={"x": "row", "y": "row"}, walks=[], elements={"x": variable("y")})

# Every op that writes an input: specs of its inputs, and settings.
CALLS: dict[str, tuple[Sequence[TensorSpec | None], dict[str, Any]]] = {
    "adafactor_": ((F, F, G, COLS, STATE), {"eps": 1e-30, "threshold": 1.0, "weight_decay": 0.0, "relative": None}),
    "adamw_": ((F, F, F, F, STATE), {**ADAMW, "weight_decay": 0.0}),
    "adamw_many_": ((STATE, F, F, F, F, F, F, F, F), {**ADAMW, "weight_decays": (0.0, 0.0)}),
    "add_": ((F, F), {}),
    "add_bias_": ((F, COLS), {}),
    "column_sum": ((F, COLS), {"accumulate": False}),
    "copy_into": ((F, COLS), {"offset": 16}),
    "cross_entropy_backward_": ((F, IDS, G), {"ignore_index": -100}),
    "embedding_backward": ((F, IDS, TensorSpec((5, 8))), {"accumulate": False}),
    "fill_": ((F,), {"bits": 0}),
    "fold": ((F, F), {"spec": IN_PLACE, "scalars": ()}),
    "layer_norm_backward": ((F, F, COLS, G, G, F), {}),
    "layer_norm_weight_backward": ((F, F, G, G, COLS, COLS), {"accumulate": False}),
    "matmul": (
        (TensorSpec((6, 3)), TensorSpec((3, 8)), COLS, F, F),
        {"trans_a": False, "trans_b": False, "activation": None, "accumulate": False},
    ),
    "rms_norm_backward": ((F, F, COLS, G, F), {}),
    "rms_norm_weight_backward": ((F, F, G, COLS), {"accumulate": True}),
    "rope_": (
        (TensorSpec((1, 6, 8)), TensorSpec((6, 2)), TensorSpec((6, 2))),
        {"num_heads": 2, "head_dim": 4, "position_offset": 0, "interleaved": False, "inverse": False},
    ),
    "sgd_": ((F, F, F, STATE), {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False}),
    "sgd_many_": (
        (STATE, F, F, F),
        {"with_momentum": True, "weight_decays": (0.0,), "momentum": 0.9, "nesterov": False},
    ),
    "zero_": ((F,), {}),
}


def written_by(op: Op) -> Sequence[int]:
    specs, settings = CALLS[op.name]
    return op.written(len(specs), **settings)


@pytest.fixture(params=["vulkan", "cpu", "plan"])
def engine(request: pytest.FixtureRequest) -> Iterator[ComputeEngine]:
    if request.param == "vulkan":
        yield request.getfixturevalue("vulkan")
    else:
        yield CpuEngine() if request.param == "cpu" else PlanEngine()


def placed(engine: ComputeEngine, spec: TensorSpec | None, whole: Tensor | None = None, first: int = 0) -> Any:
    """A tensor of its own, or a part of `whole` from element `first` on, which is as many bytes."""
    if spec is None:
        return None
    if whole is None:
        return engine.zeros(spec.shape, spec.dtype)
    return Tensor(engine, spec, whole.storage, 4 * first)


def test_every_op_that_writes_is_here() -> None:
    writing = {name for name, op in OPS.items() if op.writes or type(op).written is not Op.written}
    assert writing <= CALLS.keys()
    assert all(written_by(OPS[name]) for name in CALLS if name in OPS)


@pytest.mark.parametrize("name", sorted(name for name in CALLS if name in OPS))
def test_an_op_refuses_to_write_what_it_reads(engine: ComputeEngine, name: str) -> None:
    """Every pair of inputs of which one is written, one element apart, and the very same bytes."""
    op, (specs, settings) = OPS[name], CALLS[name]
    writes = op.written(len(specs), **settings)
    engine.execute(op, tuple(placed(engine, spec) for spec in specs), **settings)
    whole = engine.zeros((200,))
    for i, j in permutations(range(len(specs)), 2):
        if i not in writes or specs[i] is None or specs[j] is None:
            continue
        tensors = [placed(engine, spec) for spec in specs]
        start, _ = op.written_bytes(i, *specs, **settings)
        tensors[i], tensors[j] = placed(engine, specs[i], whole), placed(engine, specs[j], whole, start // 4 + 1)
        with pytest.raises(ValueError, match=rf"{name}: \w.* overlaps \w.*copy one of them first"):
            engine.execute(op, tuple(tensors), **settings)
        tensors[j] = placed(engine, specs[j], whole, start // 4)
        if name == "add_":
            engine.execute(op, tuple(tensors), **settings)  # element by element: x += x
        else:
            with pytest.raises(ValueError, match="overlaps"):
                engine.execute(op, tuple(tensors), **settings)
        if specs[j].dtype != "float32":
            continue
        apart = specs[i].size
        tensors[j] = placed(engine, specs[j], whole, apart)  # side by side
        engine.execute(op, tuple(tensors), **settings)
    engine.flush_batch()


VIEWS: dict[str, Callable[[ComputeEngine], object]] = {
    "add_: a overlaps b": lambda e: _shifted(e, lambda a: e.add_(a[1:], a[:-1])),
    "add_bias_: y overlaps bias": lambda e: _shifted(e, lambda a: e.add_bias_(a.reshape(100, 50), a[:50])),
    "copy_into: target overlaps source": lambda e: _shifted(e, lambda a: e.copy_into(a[1:], a[:-1])),
    "matmul: out overlaps a": lambda e: _shifted(
        e, lambda a: e.matmul(a[:4].reshape(2, 2), a[4:8].reshape(2, 2), out=a[2:6].reshape(2, 2))
    ),
    "embedding_backward: out overlaps dy": lambda e: _shifted(
        e, lambda a: e.embedding_backward(a[:12].reshape(3, 4), e.tensor([0, 1, 1]), a[8:20].reshape(3, 4))
    ),
    "rope_: x overlaps cos": lambda e: _shifted(
        e,
        lambda a: e.rope_(a[:8].reshape(1, 2, 4), a[:4].reshape(2, 2), a[8:12].reshape(2, 2), num_heads=1, head_dim=4),
    ),
}


def _shifted(engine: ComputeEngine, call: Callable[[Tensor], object]) -> None:
    values = np.arange(5000.0, dtype=np.float32)
    tensor = engine.tensor(values)
    try:
        call(tensor)
    finally:
        if engine.computes:
            assert np.array_equal(tensor.numpy(), values), "a refused call changed something"


@pytest.mark.parametrize("message", VIEWS)
def test_views_that_overlap_are_refused(engine: ComputeEngine, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VIEWS[message](engine)


class SwapOp(MapOp):
    """Two tensors changed in place."""

    name = "swap_"
    writes = (0, 1)
    kernel = MapKernel("swap", ("a", "b"), ("a", "b"), {"a": variable("b"), "b": variable("a")})

    def outputs(self, a: TensorSpec, b: TensorSpec) -> Sequence[TensorSpec]:
        return ()


def test_the_same_bytes_at_other_places_or_written_twice_are_refused(engine: ComputeEngine) -> None:
    """A bias is read at `index % width`, whatever the number of rows; of two results in one place one is lost."""
    row = engine.zeros((1, 8))
    with pytest.raises(ValueError, match="add_bias_: y overlaps bias"):
        engine.add_bias_(row, row[0])
    swap = SwapOp()
    engine.execute(swap, (row, engine.zeros((1, 8))))
    with pytest.raises(ValueError, match="swap_: a overlaps b"):
        engine.execute(swap, (row, row))


def test_the_same_tensor_twice_is_fine_element_by_element(vulkan: VulkanEngine) -> None:
    a = vulkan.tensor(np.arange(5000.0))
    vulkan.add_(a, a)
    vulkan.add_(a[:2500], a[2500:])
    vulkan.copy_into(a, a[:10], offset=10)
    vulkan.copy_into(a, a[20:20], offset=15)  # nothing overlaps nothing
    vulkan.add_(a[7:7], a[7:7])
    want = 2 * np.arange(5000.0)
    want[:2500] += want[2500:]
    want[10:20] = want[:10]
    assert np.array_equal(a.numpy(), want)
