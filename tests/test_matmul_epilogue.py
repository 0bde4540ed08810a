"""Epilogues of matmul that are expressions: what matmul and then a map of the expression give, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import cast, clamp, exp, fma, logistic, random_below, tanh, variable, variables, where, whole
from vkfold.engine.expr_numpy import evaluate
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import all_variants, variants
from vkfold.engine.ops.activation import activation_of
from vkfold.engine.ops.matmul_launch import MAX_SLICE
from vkfold.engine.ops.matmul_parts import BIAS, RESIDUAL, SUM, USUAL_EPILOGUE, usual_epilogue
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

TRANSPOSES = list(itertools.product((False, True), repeat=2))
GATE, ROW, LIMIT = variables("gate row limit")
EVERYTHING = clamp(fma(SUM, ROW, BIAS), -4.0, 4.0) * logistic(GATE) + RESIDUAL * LIMIT


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Case:
    """A product and operands of EVERYTHING on an engine."""

    def __init__(
        self,
        engine: Any,
        m: int,
        n: int,
        k: int,
        trans: tuple[bool, bool] = (False, False),
        lead: tuple[int, ...] = (),
        shared: bool = False,
    ) -> None:
        a, b = ((k, m) if trans[0] else (m, k)), ((n, k) if trans[1] else (k, n))
        self.engine, self.out_shape = engine, (*lead, m, n)
        self.a, self.b = engine.tensor(array(*lead, *a)), engine.tensor(array(*(() if shared else lead), *b, seed=1))
        self.trans = {"trans_a": trans[0], "trans_b": trans[1]}
        self.bias, self.residual = engine.tensor(array(n)), engine.tensor(array(*lead, m, n, seed=2))
        self.gate, self.row = engine.tensor(array(*lead, m, n, seed=3)), engine.tensor(array(*lead, m, 1, seed=4))

    def fused(self, **settings: Any) -> Tensor:
        operands = {"gate": self.gate, "row": self.row, "limit": 0.3}
        made: Tensor = self.engine.matmul(
            self.a,
            self.b,
            epilogue=EVERYTHING,
            bias=self.bias,
            residual=self.residual,
            operands=operands,
            **self.trans,
            **settings,
        )
        return made

    def apart(self, **settings: Any) -> Tensor:
        product = self.engine.matmul(self.a, self.b, **self.trans, **settings)
        made: Tensor = self.engine.map(
            EVERYTHING, sum=product, gate=self.gate, row=self.row, bias=self.bias, residual=self.residual, limit=0.3
        )
        return made

    def check(self, **settings: Any) -> None:
        assert np.array_equal(self.fused(**settings).numpy(), self.apart(**settings).numpy())


@pytest.mark.parametrize("trans", TRANSPOSES)
def test_bits_are_those_of_matmul_then_map(vulkan: VulkanEngine, trans: tuple[bool, bool]) -> None:
    """Odd and even sizes, pairs of elements, batches, and one B for all."""
    for m, n, k in ((5, 7, 9), (33, 40, 16), (66, 70, 72), (1, 1, 3)):
        Case(vulkan, m, n, k, trans).check()
    for lead, shared in (((3,), False), ((2, 3), True)):
        Case(vulkan, 9, 13, 8, trans, lead, shared).check()


@pytest.mark.parametrize("trans", TRANSPOSES)
def test_every_variant_has_it(vulkan: VulkanEngine, trans: tuple[bool, bool]) -> None:
    """Lanes along rows, split sums, tiles of a workgroup: each against its own product."""
    case = Case(vulkan, 21, 35, 77, trans)
    own = [v for v in variants(Capabilities.of(vulkan.recorder)) if v.tm * v.tn <= 32]
    names = [v.name + swapped for v in own for swapped in ("", "_swapped")]
    size = vulkan.recorder.subgroup_size
    others = [v for v in all_variants(size) if v.split > 1 or (v.spread == "shared" and v.written == (size == 4))]
    for name in (*names, *(v.name for v in others)):
        with forced_variant(name):
            case.check()
    assert any(v.split > 1 for v in others) and any(v.spread == "shared" for v in others)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_operands_of_less_precision(vulkan: VulkanEngine, precision: str) -> None:
    Case(vulkan, 33, 18, 21).check(precision=precision)
    rounded = exp(SUM) * cast(SUM, "bfloat16")  # brings functions that the tile of a workgroup has too
    a, b = vulkan.tensor(array(5, 4)), vulkan.tensor(array(4, 6))
    product = vulkan.matmul(a, b, precision=precision)
    made = vulkan.matmul(a, b, precision=precision, epilogue=rounded)
    assert np.array_equal(made.numpy(), vulkan.map(rounded, sum=product).numpy())


def test_out_accumulation_and_slices(vulkan: VulkanEngine) -> None:
    """The epilogue sees the whole sum: of out and the product, and of all slices of a long k."""
    case = Case(vulkan, 9, 12, 7)
    before = vulkan.tensor(array(9, 12, seed=5))
    out, expected = vulkan.copy(before), vulkan.copy(before)
    assert case.fused(out=out, accumulate=True) is out
    vulkan.matmul(case.a, case.b, out=expected, accumulate=True)
    operands = {"gate": case.gate, "row": case.row, "bias": case.bias, "residual": case.residual, "limit": 0.3}
    assert np.array_equal(out.numpy(), vulkan.map(EVERYTHING, sum=expected, **operands).numpy())
    Case(vulkan, 2, 3, MAX_SLICE + 5).check()
    Case(vulkan, 2, 3, MAX_SLICE + 5, (True, True)).check()
    Case(vulkan, 4, 3, 0).check()


def test_reference(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """The CPU engine evaluates the same expression; numbers are float32 there as well."""
    for lead in ((), (2,)):
        got, expected = (Case(engine, 7, 10, 12, lead=lead).fused().numpy() for engine in (vulkan, oracle))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_noise_belongs_to_the_elements_of_c(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Dropout as an epilogue is dropout of the product, batched and swapped too."""
    keep = where(random_below(whole("threshold"), whole("site")), 0.0, SUM * variable("factor"))
    given = {"threshold": 2**31, "site": 3, "factor": 2.0}
    for lead in ((), (3,)):
        a, b = array(*lead, 17, 5), array(*lead, 5, 9)
        made = []
        for swapped in ("", "_swapped"):
            with forced_variant(variants(MatmulChooser.of(vulkan.recorder).device)[-1].name + swapped):
                x, y = vulkan.tensor(a), vulkan.tensor(b)
                made.append(vulkan.matmul(x, y, epilogue=keep, operands=given).numpy())
                apart = vulkan.dropout(vulkan.matmul(x, y), p=0.5, site=3).numpy()
            assert np.array_equal(made[-1], apart)
        assert 0 < (made[0] == 0).mean() < 1
        host = oracle.matmul(oracle.tensor(a), oracle.tensor(b), epilogue=keep, operands=given).numpy()
        assert np.array_equal(host == 0, made[0] == 0)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_the_usual_epilogue_is_one_expression(vulkan: VulkanEngine, activation: str | None) -> None:
    """Its parts chosen at run time, as its own expression, and in NumPy: the same."""
    case = Case(vulkan, 33, 40, 16)
    for with_bias, with_residual in itertools.product((False, True), repeat=2):
        root = usual_epilogue(with_bias, activation, with_residual)
        expected = SUM + BIAS if with_bias else SUM
        expected = expected if activation is None else activation_of(expected, activation)
        assert root is (RESIDUAL + expected if with_residual else expected)
        given = {"bias": case.bias} if with_bias else {}
        given |= {"residual": case.residual} if with_residual else {}
        usual = vulkan.matmul(case.a, case.b, activation=activation, **given).numpy()
        assert np.array_equal(usual, vulkan.matmul(case.a, case.b, epilogue=root, **given).numpy())
    numbers = {"has_bias": 1, "activation": 0, "has_residual": 0, "residual": np.float32(0)}
    (value,) = evaluate([USUAL_EPILOGUE], sum=array(3), bias=array(3, seed=1), **numbers)
    assert np.array_equal(value, array(3) + array(3, seed=1))


def test_other_names_numbers_and_shapes_are_no_other_kernel(vulkan: VulkanEngine) -> None:
    chooser = MatmulChooser.of(vulkan.recorder)
    chooser.plans.clear()
    for m, name, number in ((8, "limit", 2.0), (8, "limit", 3.0), (16, "top", 4.0)):
        a, b = vulkan.tensor(array(m, 8)), vulkan.tensor(array(8, 8))
        capped = tanh(SUM / variable(name)) * variable(name)
        got = vulkan.matmul(a, b, epilogue=capped, operands={name: number}).numpy()
        assert np.abs(got - number * np.tanh(array(m, 8) @ array(8, 8) / number)).max() < 1e-5
    plans = list(chooser.plans.values())
    assert len(plans) == 2  # of two shapes
    assert plans[0].parts == plans[1].parts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epilogue": SUM * GATE}, "no value for gate; the epilogue has sum, gate"),
        ({"epilogue": SUM + BIAS}, "no value for bias"),
        ({"epilogue": SUM * 2.0, "operands": {"gate": 1.0}}, "nothing is called gate"),
        ({"epilogue": GATE * 2.0, "operands": {"gate": 1.0}}, "does not have SUM"),
        ({"epilogue": SUM * GATE, "operands": {"gate": (2, 3)}}, r"gate is float32 \(2, 3\), needed is .* \(2, 5\)"),
        ({"epilogue": SUM < 1.0}, "epilogue is .*, needed is an expression of SUM"),
        ({"epilogue": "relu"}, "epilogue is .*'relu'.*, needed is an expression of SUM"),
        ({"operands": {"gate": 1.0}}, "operands without an epilogue"),
        ({"epilogue": SUM * 2.0, "activation": "relu"}, "make the activation part of the epilogue"),
        ({"epilogue": SUM + BIAS, "operands": {"bias": 1.0}}, "argument of its own: bias="),
        ({"epilogue": SUM * GATE, "operands": {"gate": 1e39}}, "gate is 1e\\+39, which does not fit float32"),
        (
            {"epilogue": sum(variables("p q r s t u"), SUM), "operands": dict.fromkeys("pqrstu", (2, 5))},
            "takes 6 tensors and 0 numbers, more than the 128 bytes",
        ),
        (
            {"epilogue": where(random_below(whole("t"), 0), 0.0, SUM), "operands": {"t": -1}},
            "t is .*, needed is a whole number of 32 bits",
        ),
    ],
)
def test_what_does_not_fit_is_refused(cpu: CpuEngine, settings: dict[str, Any], message: str) -> None:
    a, b = cpu.tensor(array(2, 3)), cpu.tensor(array(3, 5))
    operands = settings.get("operands")
    if operands is not None:
        given = {n: cpu.tensor(array(*v)) if isinstance(v, tuple) else v for n, v in operands.items()}
        settings = {**settings, "operands": given}
    with pytest.raises(ValueError, match=message):
        cpu.matmul(a, b, **settings)


def test_an_operand_cannot_be_what_is_written(cpu: CpuEngine) -> None:
    a, out = cpu.tensor(array(4, 4)), cpu.tensor(array(4, 4))
    with pytest.raises(ValueError, match="overlap"):
        cpu.matmul(a, a, out=out, epilogue=SUM * GATE, operands={"gate": out})
