"""Matrix product: every transposition, odd sizes, epilogues, batches. Variants: test_matmul_variants.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32, check_gradient, check_op, run, sampled_sizes

TRANSPOSES = list(itertools.product((False, True), repeat=2))


def operands(
    m: int,
    n: int,
    k: int,
    trans_a: bool,
    trans_b: bool,
    seed: int = 0,
    lead: tuple[int, ...] = (),
    shared: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed + 1000 * m + 100 * n + k)
    a = rng.standard_normal((*lead, *((k, m) if trans_a else (m, k)))).astype(np.float32)
    b = rng.standard_normal((*(() if shared else lead), *((n, k) if trans_b else (k, n)))).astype(np.float32)
    return a, b


def magnitude(a: np.ndarray, b: np.ndarray, trans_a: bool, trans_b: bool) -> np.ndarray:
    """|A| |B| in float64."""
    a, b = np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))
    return (np.swapaxes(a, -1, -2) if trans_a else a) @ (np.swapaxes(b, -1, -2) if trans_b else b)


def check_product(
    vulkan: VulkanEngine, oracle: CpuEngine, a: np.ndarray, b: np.ndarray, trans_a: bool, trans_b: bool
) -> None:
    k = a.shape[-2] if trans_a else a.shape[-1]
    bound = 2 * k * EPS32 * magnitude(a, b, trans_a, trans_b)
    check_op(
        vulkan,
        oracle,
        lambda engine, x, y: engine.matmul(x, y, trans_a=trans_a, trans_b=trans_b),
        (a, b),
        lambda expected: [bound],
    )


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_odd_sizes(vulkan: VulkanEngine, oracle: CpuEngine, trans_a: bool, trans_b: bool) -> None:
    """|error| <= 2 K 2^-24 (|A||B|) for every size in every place, and a seeded sample of combinations."""
    for m, n, k in sampled_sizes(3, 40, seed=2 * trans_a + trans_b):
        check_product(vulkan, oracle, *operands(m, n, k, trans_a, trans_b), trans_a, trans_b)


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_aligned_sizes(vulkan: VulkanEngine, oracle: CpuEngine, trans_a: bool, trans_b: bool) -> None:
    """The 16-byte loads: sizes that are multiples of 4, tile edges cut through."""
    for m, n, k in ((4, 4, 4), (8, 4, 12), (20, 36, 28), (68, 132, 20), (32, 64, 16), (100, 100, 256), (12, 260, 8)):
        check_product(vulkan, oracle, *operands(m, n, k, trans_a, trans_b), trans_a, trans_b)


def test_transposition_agrees_to_the_bit(vulkan: VulkanEngine) -> None:
    """All four forms of one product add in the same order; so do 16-byte and 4-byte loads (a column more)."""
    a, b = operands(44, 36, 64, False, False)
    plain = (vulkan.tensor(a) @ vulkan.tensor(b)).numpy()
    for trans_a, trans_b in TRANSPOSES:
        x = np.ascontiguousarray(a.T) if trans_a else a
        y = np.ascontiguousarray(b.T) if trans_b else b
        result = vulkan.matmul(vulkan.tensor(x), vulkan.tensor(y), trans_a=trans_a, trans_b=trans_b).numpy()
        assert np.array_equal(result, plain)
    wider = np.concatenate([b, b[:, :1]], axis=1)
    assert np.array_equal((vulkan.tensor(a) @ vulkan.tensor(wider)).numpy()[:, :36], plain)


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_batched(vulkan: VulkanEngine, oracle: CpuEngine, trans_a: bool, trans_b: bool) -> None:
    """Equal leading dimensions, and one B for all."""
    for lead, shared in (((3,), False), ((2, 3), False), ((3,), True), ((2, 2), True)):
        for m, n, k in ((5, 9, 7), (8, 12, 16)):
            a, b = operands(m, n, k, trans_a, trans_b, lead=lead, shared=shared)
            check_product(vulkan, oracle, a, b, trans_a, trans_b)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("m,n,k", [(33, 40, 16), (7, 13, 9)])
def test_epilogue(vulkan: VulkanEngine, oracle: CpuEngine, activation: str | None, m: int, n: int, k: int) -> None:
    """Bias, activation and residual, each alone and together; the same bits as the separate ops."""
    rng = np.random.default_rng(5)
    a, b = operands(m, n, k, False, False)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((m, n)).astype(np.float32)
    # The derivatives of the activations stay below 1.2; their own error is a few units in the last place.
    bound = 2 * (k + 2) * EPS32 * (magnitude(a, b, False, False) + np.abs(bias) + np.abs(residual)) * 1.2 + 2e-6
    for with_bias, with_residual in itertools.product((False, True), repeat=2):
        check_op(
            vulkan,
            oracle,
            lambda engine, x, y, c, r, bias_on=with_bias, residual_on=with_residual: engine.matmul(
                x, y, bias=c if bias_on else None, activation=activation, residual=r if residual_on else None
            ),
            (a, b, bias, residual),
            lambda expected: [bound],
        )
    x, y, r = vulkan.tensor(a), vulkan.tensor(b), vulkan.tensor(residual)
    fused = vulkan.matmul(x, y, activation=activation, residual=r).numpy()
    apart = vulkan.matmul(x, y)
    apart = vulkan.activation(apart, activation) if activation else apart
    assert np.array_equal(fused, vulkan.add(r, apart).numpy())


@pytest.mark.parametrize("m,n,k", [(33, 40, 16), (7, 13, 9), (4, 4, 2)])
def test_out_and_accumulate(vulkan: VulkanEngine, m: int, n: int, k: int) -> None:
    """out is overwritten, whatever it held; accumulate adds to it, like the front of a longer sum."""
    a, b = operands(m, n, k, True, False)
    x, y = vulkan.tensor(a), vulkan.tensor(b)
    product = vulkan.matmul(x, y, trans_a=True).numpy()
    out = vulkan.tensor(np.full((m, n), np.nan, np.float32))
    assert vulkan.matmul(x, y, trans_a=True, out=out) is out
    assert np.array_equal(out.numpy(), product)
    vulkan.matmul(x, y, trans_a=True, out=out, accumulate=True)
    longer = [vulkan.tensor(np.concatenate([part, part])) for part in (a, b)]
    assert np.array_equal(out.numpy(), vulkan.matmul(*longer, trans_a=True).numpy())


def test_writes_nothing_else(vulkan: VulkanEngine) -> None:
    """Rows before and behind an out that is a slice of a tensor keep their values."""
    for n in (12, 13):
        a, b = operands(5, n, 9, False, False)
        whole = vulkan.tensor(np.full((12, n), 7.0, np.float32))
        vulkan.matmul(vulkan.tensor(a), vulkan.tensor(b), out=whole.rows(4, 9))
        after = whole.numpy()
        assert (after[:4] == 7).all() and (after[9:] == 7).all()
        np.testing.assert_allclose(after[4:9], a @ b, rtol=1e-4, atol=1e-5)


def test_misaligned_view(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """A tensor that starts in the middle of 16 bytes takes the 4-byte loads."""
    table = np.random.default_rng(1).standard_normal((9, 3)).astype(np.float32)
    b = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)
    (got,) = run(vulkan, lambda engine, t, y: engine.matmul(t.rows(1, 9).reshape(6, 4), y), (table, b))
    np.testing.assert_allclose(got, table[1:].reshape(6, 4) @ b, rtol=1e-5, atol=1e-6)


def test_not_finite(vulkan: VulkanEngine) -> None:
    """Infinities and NaN reach the elements they belong to and no other."""
    a, b = operands(9, 10, 6, False, False)
    a[2, 3], a[5, 1] = np.inf, np.nan
    result = (vulkan.tensor(a) @ vulkan.tensor(b)).numpy()
    finite = np.isfinite(result)
    assert not finite[[2, 5]].any() and finite[[0, 1, 3, 4, 6, 7, 8]].all()


def test_empty(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Sizes of 0: nothing to compute, or a sum of nothing."""
    for m, n, k in ((0, 3, 2), (3, 0, 2), (3, 5, 0)):
        check_product(vulkan, oracle, np.zeros((m, k), np.float32), np.zeros((k, n), np.float32), False, False)


@pytest.mark.parametrize("trans_a,trans_b", [(False, False), (True, True)])
def test_very_long_sum(vulkan: VulkanEngine, trans_a: bool, trans_b: bool) -> None:
    """More rounds than lavapipe 22.3 lets a loop run (CPU drivers end it silently): k comes in slices."""
    k = 2 * 131072 + 5  # more than one slice
    a, b = np.ones((2, k), np.float32), np.ones((k, 3), np.float32)
    a[:, ::2] = 2
    expected = np.full((2, 3), a[0].sum(dtype=np.float64))
    x = vulkan.tensor(np.ascontiguousarray(a.T) if trans_a else a)
    y = vulkan.tensor(np.ascontiguousarray(b.T) if trans_b else b)
    bias = vulkan.tensor(np.full(3, 4.0, np.float32))
    out = vulkan.tensor(np.full((2, 3), 10.0, np.float32))
    assert np.array_equal(vulkan.matmul(x, y, trans_a=trans_a, trans_b=trans_b).numpy(), expected)
    vulkan.matmul(x, y, trans_a=trans_a, trans_b=trans_b, bias=bias, out=out, accumulate=True)
    assert np.array_equal(out.numpy(), expected + 14)


def test_gradient_formulas(oracle: CpuEngine) -> None:
    """dA = dC B^T and dB = A^T dC, as layers use them."""
    a, b = operands(4, 5, 3, False, False)
    check_gradient(
        oracle,
        lambda engine, x, y: engine.matmul(x, y),
        lambda engine, dc, x, y: (engine.matmul(dc, y, trans_b=True), engine.matmul(x, dc, trans_a=True)),
        (a, b),
    )


@pytest.mark.parametrize(
    "a,b,settings,message",
    [
        ((2, 3), (4, 5), {}, "has 3 columns.*has 4 rows"),
        ((2, 3), (4, 3), {"trans_a": True, "trans_b": True}, "has 2 columns.*has 3 rows"),
        ((3,), (3, 5), {}, "a of shape .* needs two dimensions"),
        ((2, 4, 3), (3, 3, 5), {}, "leading dimensions"),
        ((2, 3), (3, 5), {"activation": "tanh"}, "unknown activation 'tanh'"),
        ((2, 3), (3, 5), {"accumulate": True}, "needs out"),
    ],
)
def test_bad_shapes(
    cpu: CpuEngine, a: tuple[int, ...], b: tuple[int, ...], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.matmul(cpu.tensor(np.zeros(a)), cpu.tensor(np.zeros(b)), **settings)


def test_bad_partners(cpu: CpuEngine) -> None:
    a, b = cpu.tensor(np.zeros((2, 3))), cpu.tensor(np.zeros((3, 5)))
    with pytest.raises(ValueError, match=r"bias is float32 \(4,\), needed is float32 \(5,\)"):
        cpu.matmul(a, b, bias=cpu.tensor(np.zeros(4)))
    with pytest.raises(ValueError, match="residual"):
        cpu.matmul(a, b, residual=cpu.tensor(np.zeros(5)))
    with pytest.raises(ValueError, match="a is int32"):
        cpu.matmul(cpu.tensor(np.zeros((2, 3), np.int32)), b)
    square = cpu.tensor(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="out overlaps residual"):
        cpu.matmul(cpu.tensor(np.zeros((4, 4))), cpu.tensor(np.zeros((4, 4))), residual=square, out=square)
