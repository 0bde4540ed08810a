"""Expressions: device against NumPy on random ones, derivatives against finite differences, bits kept by simplify."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vkfold.engine import expr as e
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr_derivative import derivative, pullback
from vkfold.engine.expr_glsl import KINDS, glsl_branches, glsl_statements
from vkfold.engine.expr_numpy import evaluate
from vkfold.engine.expr_simplify import simplify
from vkfold.engine.expr_walk import expanded, substitute, topological
from vkfold.engine.map_kernel import MapKernel
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine

A, B = e.variables("a b")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-3, -7.25, 1e30, -1e30, np.inf, -np.inf, np.nan]
PAIRS = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32).T.copy()
WORK = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAVES = st.one_of(st.sampled_from([A, B]), st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1, 2.5]).map(e.constant))


def exact(children: st.SearchStrategy[e.Expr]) -> st.SearchStrategy[e.Expr]:
    """Operations whose float32 result is the same on every device."""
    two = st.sampled_from(["add", "sub", "mul", "max", "min"])
    one = st.sampled_from(["neg", "abs", "float16", "bfloat16"])
    plain = st.builds(e.make, st.sampled_from(sorted(e.COMPARISONS)), children, children)
    comparison = st.one_of(
        plain, st.builds(e.make, st.sampled_from(["and", "or"]), plain, plain), st.builds(lambda c: ~c, plain)
    )
    return st.one_of(
        st.builds(e.make, two, children, children),
        st.builds(e.make, one, children),
        st.builds(e.where, comparison, children, children),
    )


def smooth(children: st.SearchStrategy[e.Expr]) -> st.SearchStrategy[e.Expr]:
    """Operations that keep values tame and can be derived."""
    squashed = st.sampled_from([e.tanh, e.logistic, lambda x: e.rsqrt(1.5 + x * x), lambda x: e.log(1.5 + x * x)])
    two = st.sampled_from(["add", "sub", "mul"])
    return st.one_of(
        st.builds(lambda f, x: f(x), squashed, children),
        st.builds(lambda op, x, y: e.make(op, e.tanh(x), y), two, children, children),
        st.builds(lambda x, y, z: e.fma(e.logistic(x), y, z), children, children, children),
        st.builds(lambda x, y: e.exp(e.logistic(x)) / (2.0 + e.logistic(y)), children, children),
    )


def general(children: st.SearchStrategy[e.Expr]) -> st.SearchStrategy[e.Expr]:
    """Every operation that makes a float, conditions and random numbers included."""
    by_size = {n: sorted(op for op, s in e.SIGNATURES.items() if s == "f" * n + "->f") for n in (1, 2, 3)}
    plain = st.builds(e.make, st.sampled_from(sorted(e.COMPARISONS)), children, children)
    drawn = st.sampled_from([e.random_below(2**31, 1), e.same(e.whole("n"), 3), e.below(e.whole("n"), 5)])
    condition = st.one_of(
        plain,
        drawn,
        st.builds(e.make, st.sampled_from(["and", "or"]), plain, drawn),
        st.builds(e.make, st.sampled_from(["and", "or"]), plain, plain),
        st.builds(lambda x: ~x, plain),
    )
    return st.one_of(
        st.builds(e.make, st.sampled_from(by_size[1]), children),
        st.builds(e.make, st.sampled_from(by_size[2]), children, children),
        st.builds(e.make, st.sampled_from(by_size[3]), children, children, children),
        st.builds(e.where, condition, children, children),
    )


EXACT = st.recursive(LEAVES, exact, max_leaves=10)
GENERAL = st.recursive(st.one_of(LEAVES, st.just(e.uniform(2))), general, max_leaves=12)
SMOOTH = st.recursive(LEAVES, smooth, max_leaves=6)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bits, any NaN being as good as another; a subnormal may have been flushed to a zero of either sign."""
    small = (want != 0) & (np.abs(want) < 2.0**-126) & (np.abs(got) < 2.0**-126)
    bits = got.view(np.uint32) == want.view(np.uint32)
    return bool(np.all(bits | small | (np.isnan(got) & np.isnan(want))))


def on_device(vulkan: VulkanEngine, root: e.Expr, a: np.ndarray, b: np.ndarray, wide: bool = True) -> np.ndarray:
    kernel = MapKernel("test_expr", ("a", "b"), ("y",), {"y": root})
    x, y, out = vulkan.tensor(a), vulkan.tensor(b), vulkan.zeros((a.size,))
    kernel.launch(vulkan, a.size, x, y, out, wide=wide)
    return out.numpy()


@WORK
@given(root=EXACT, wide=st.booleans())
def test_device_has_numpys_bits(vulkan: VulkanEngine, root: e.Expr, wide: bool) -> None:
    """Exact operations give equal numbers in both kernels, while all is finite: lavapipe makes 0 * x and x - x into 0
    even where x is infinite, which Vulkan allows.
    """
    a, b = np.array(
        list(itertools.product([0.0, 1.0, -1.0, 0.5, 3.3, 1e-3, -7.25, 999.0], repeat=2)), np.float32
    ).T.copy()
    got, want = on_device(vulkan, root, a, b, wide), evaluate([root], a=a, b=b)[0]
    every = evaluate([node for node in topological([root]) if not node.is_condition], a=a, b=b)
    finite = np.all(np.isfinite(every), axis=0)
    assert np.array_equal(got[finite], want[finite]), glsl_statements({"y": root}, "float")


@pytest.mark.parametrize("wide", [True, False])
def test_special_values_have_numpys_bits(vulkan: VulkanEngine, wide: bool) -> None:
    """Choices, comparisons, casts and single sums and products on NaN, infinities and zeros of both signs."""
    chosen = [e.where(e.make(op, A, B), A, B) for op in sorted(e.COMPARISONS)]
    chosen += [e.where((A < B) & (A > 0.0), A, B), e.where((A < B) | ~(B > 0.0), A, B)]
    others = [e.maximum(A, B), e.minimum(A, B), e.clamp(A, -2, 2), -A, abs(A), A + B, A - B, A * B]
    for root in [*chosen, *others, e.cast(A, "float16"), e.cast(A, "bfloat16"), e.cast(A < B, "float32")]:
        assert same(on_device(vulkan, root, PAIRS[0], PAIRS[1], wide), evaluate([root], a=PAIRS[0], b=PAIRS[1])[0]), (
            root
        )


@pytest.mark.parametrize("wide", [True, False])
def test_constants_have_numpys_bits(vulkan: VulkanEngine, wide: bool) -> None:
    """Constants of either sign as operands and as what is chosen, which compilers are fond of folding away."""
    numbers = [0.0, -0.0, 1.0, -1.0, 2.0, np.inf]
    roots = [e.where(A >= B, x, y) for x, y in itertools.product(numbers, repeat=2)]
    for x in numbers:
        roots += [e.make(op, *pair) for op in ("add", "sub", "mul", "max") for pair in ((A, x), (x, A))]
        roots += [e.fma(A, B, x), e.fma(A, x, B), e.fma(x, A, B), e.where(A >= B, A, x) + x, A - A + x]
    roots += [e.make("div", *pair) for x in (0.0, -0.0) for pair in ((A, x), (x, A))]
    outputs = {f"y{i}": root for i, root in enumerate(roots)}
    wants = evaluate(roots, a=PAIRS[0], b=PAIRS[1])
    with np.errstate(all="ignore"):
        overflows = np.isinf(PAIRS[0] * PAIRS[1]) & np.isfinite(PAIRS).all(axis=0)
    a, b = vulkan.tensor(PAIRS[0]), vulkan.tensor(PAIRS[1])
    for first in range(0, len(roots), 8):
        some = dict(list(outputs.items())[first : first + 8])
        made = [vulkan.zeros((a.size,)) for _ in some]
        kernel = MapKernel(f"constants{first}", ("a", "b"), list(some), some)
        kernel.launch(vulkan, a.size, a, b, *made, wide=wide)
        for root, got, want in zip(some.values(), made, wants[first:], strict=False):
            # quotients are inexact, and fma rounds (and overflows) twice where the device has none: their ends are not
            inexact = root.op in ("fma", "div")
            kept = ~overflows & ((want == 0) | ~np.isfinite(want)) if inexact else slice(None)
            assert same(got.numpy()[kept], want[kept]), glsl_statements({"y": root}, "float")


@WORK
@given(root=SMOOTH, wide=st.booleans())
def test_device_is_close_to_numpy(vulkan: VulkanEngine, root: e.Expr, wide: bool) -> None:
    """exp, log, rsqrt and division within Vulkan's precision table; every intermediate is below 10 or so."""
    rng = np.random.default_rng(3)
    a, b = rng.uniform(-2, 2, (2, 101)).astype(np.float32)
    want = evaluate([root], a=a.astype(np.float64), b=b.astype(np.float64))[0]
    nodes = len(topological(expanded([root])))
    bound = 32 * nodes * 2.0**-24 * np.maximum(1, np.abs(want))
    assert np.all(np.abs(on_device(vulkan, root, a, b, wide=wide) - want) <= bound)


@WORK
@given(root=SMOOTH)
def test_derivative_is_the_finite_difference(root: e.Expr) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.uniform(-2, 2, (2, 50))
    step = 1e-5
    high, low = (evaluate([root], a=a + sign * step, b=b)[0] for sign in (1, -1))
    numeric = (high - low) / (2 * step)
    analytic = evaluate([derivative(root, A)], a=a, b=b)[0]
    assert np.all(np.abs(numeric - analytic) <= 1e-6 * (1 + np.abs(analytic)))


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (e.maximum(A, 1.0), [0, 1, 1]),
        (e.minimum(A, 1.0), [1, 1, 0]),
        (abs(A - 1.0), [-1, 1, 1]),
        (A / (A + 1.0), [1 / 2.25, 1 / 4, 1 / 9]),
        (e.where(A > 1.5, A * A * A, 2.0 * A), [2, 2, 12]),
        (e.cast(A * A, "bfloat16"), [1, 2, 4]),
        (e.cast(A > B, "float32"), [0, 0, 0]),
        (-e.log(A), [-2, -1, -0.5]),
        (B * B, [0, 0, 0]),
    ],
)
def test_derivatives_at_points(root: e.Expr, expected: list[float]) -> None:
    """Corners, quotients, casts, at 0.5, 1 and 2."""
    got = evaluate([derivative(root, A)], a=np.array([0.5, 1, 2]), b=np.zeros(3))[0]
    assert np.allclose(got, expected, rtol=1e-12, atol=0)


def test_branch_not_taken_is_zero() -> None:
    """x * logistic(clamped x) at infinity: the slope is 1 and 0, not NaN."""
    slope = derivative(A * e.logistic(e.clamp(A, -200, 200)), A)
    got = evaluate([slope], a=np.array([np.inf, -np.inf, 0, np.nan], np.float32))[0]
    assert got[:3].tolist() == [1, 0, 0.5] and np.isnan(got[3])


def test_branches_not_taken_are_zero_in_sums_and_products() -> None:
    """Where each of several branches is not taken, under conditions of their own, an infinite factor finds nothing."""
    one, two = e.maximum(A, 0.0), e.maximum(2.0 * A, 0.0)
    first = e.rsqrt(e.where(A > B, A - B, 0.0) + e.minimum(one, 3.0))
    for root, at in [
        (e.rsqrt(one + two), -1),
        (e.log(one - two), -1),
        (e.log(one * two), -1),
        (first, -2),
        (first, -1),
    ]:
        assert evaluate([derivative(root, A)], a=np.array([at], np.float32), b=np.zeros(1, np.float32))[0] == 0, at
        steep = pullback(one + two, "a")
        assert evaluate(steep.values(), a=np.array([-1.0]), dy=np.array([np.inf]))[0] == 0
    # half of it is not taken, the other half is
    assert evaluate([derivative(e.exp(one + A), A)], a=np.array([-1.0, 2.0]))[0] == pytest.approx(
        [np.exp(-1), 2 * np.exp(4)]
    )


def test_a_deep_chain_of_branches_derives_in_no_time() -> None:
    """Every choice is in the derivative once, however many follow each other."""
    root: e.Expr = A
    for _ in range(40):
        root = e.maximum(root, 0.1 * root) + e.maximum(root, 0.0)
    assert len(topological([derivative(root, A)])) < 2000
    assert evaluate([derivative(root, A)], a=np.array([1.0, -1.0]))[0] == pytest.approx([2.0**40, 0.1**40], abs=0)


@WORK
@given(root=EXACT)
def test_simplify_keeps_the_bits(root: e.Expr) -> None:
    """In float32 and in float64."""
    for dtype in (np.float32, np.float64):
        a, b = PAIRS.astype(dtype)
        got, want = (evaluate([x], a=a, b=b)[0] for x in (simplify(root), root))
        assert got.dtype == want.dtype == dtype
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(want)])


def values(root: e.Expr, dtype: Any) -> np.ndarray:
    """On pairs of special and ordinary numbers, any NaN being 7."""
    a, b = np.concatenate([PAIRS, np.random.default_rng(4).uniform(-3, 3, (2, 31))], axis=1).astype(dtype)
    got = evaluate([root], a=a, b=b, n=np.arange(a.size) % 7, step=StepParameters(seed=1))[0]
    assert got.dtype == dtype
    return np.where(np.isnan(got), dtype(7), got).view(np.uint32)


@settings(WORK, max_examples=300)
@given(root=GENERAL)
def test_any_expression_simplifies_and_derives(root: e.Expr) -> None:
    """Whatever the operations: nothing raises, and simplified it has the same bits, as have its derivatives."""
    for node in (root, first := derivative(root, A), derivative(first, B)):
        for dtype in (np.float32, np.float64):
            assert np.array_equal(values(simplify(node), dtype), values(node, dtype)), glsl_statements({"y": node}, "T")


@settings(WORK, max_examples=300)
@given(root=GENERAL)
def test_any_derivative_is_the_finite_difference(root: e.Expr) -> None:
    """Where numbers stay tame and the slopes of both sides agree: away from corners, jumps and poles."""
    order = topological([root])
    if any(node.op in ("float16", "bfloat16") for node in order):
        return  # by convention these have another derivative than their values
    a, b = np.random.default_rng(6).uniform(-2, 2, (2, 40))
    rest: dict[str, Any] = {"b": b, "n": np.arange(40) % 7, "step": StepParameters(seed=1)}
    low, here, high = (evaluate([root], a=a + shift * 1e-6, **rest)[0] for shift in (-1, 0, 1))
    with np.errstate(invalid="ignore"):
        below, above = (here - low) / 1e-6, (high - here) / 1e-6
    floats = evaluate([node for node in order if node.kind == "f"], a=a, **rest)
    tame = np.all([np.abs(value) < 100 for value in floats], axis=0) & (np.abs(below) < 100)
    smooth = tame & (np.abs(above - below) < 1e-3)
    analytic = evaluate([derivative(root, A)], a=a, **rest)[0]
    wrong = smooth & ~(np.abs(analytic - above) < 2e-3)
    assert not wrong.any(), (glsl_statements({"y": root}, "T"), a[wrong], b[wrong])


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (-1.0 * e.make("neg", A), A), (e.make("neg", A) / -1.0, A), (e.fma(1.0, A, -B), A - B),
        (e.fma(A, 1.0, e.constant(-0.0)), A), (e.fma(-A, -1.0, B), B + A), (e.fma(-1.0, A, B), B - A),
    ],
)  # fmt: skip
def test_simplified_twice_over(root: e.Expr, expected: e.Expr) -> None:
    """What one identity leaves another may simplify."""
    assert simplify(root) is expected


def test_simplify_removes_exact_identities_only() -> None:
    c = e.constant
    for before, after in [
        (A * 1.0, A), (1.0 * A, A), (A / 1.0, A), (A + c(-0.0), A), (A - 0.0, A), (-e.make("neg", A), A),
        (A * -1.0, -A),
        (A + -B, A - B), (A - e.make("neg", B), A + B), (e.fma(A, 1.0, B), A + B), (e.fma(A, B, c(-0.0)), A * B),
        (e.where(A < B, A, A), A), (c(2.0) * c(3.0) * A, c(6.0) * A), (abs(-A), abs(A)),
    ]:  # fmt: skip
        assert simplify(before) is after, before
    for kept in (A + 0.0, A * 0.0, A - A, A / A, c(0.1) + c(0.2), c(0.1) * c(3.0), 0.0 - A, e.fma(A, B, 0.0)):
        assert simplify(kept) is kept


def test_fma_rounds_once() -> None:
    """Products of 24 bits whose sum lies between two float32 numbers; compared with exact integers."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(2**23, 2**24, 4000) for _ in range(2))
    c = rng.integers(-(2**24), 2**24, 4000) * 2**20
    total = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]

    def rounded(n: int) -> float:
        shift = max(0, abs(n).bit_length() - 24)
        low, rest = abs(n) >> shift, abs(n) & ((1 << shift) - 1)
        half = (1 << shift) >> 1
        up = shift > 0 and (rest > half or (rest == half and low & 1))
        return float((low + up) << shift) * (1 if n >= 0 else -1)

    arrays: dict[str, Any] = {name: x.astype(np.float32) for name, x in (("a", a), ("b", b), ("c", c))}
    got = evaluate([e.fma(*e.variables("a b c"))], **arrays)[0]
    assert got.dtype == np.float32
    assert got.tolist() == [rounded(n) for n in total]


@pytest.mark.parametrize("function", [e.exp, e.log, e.rsqrt, e.tanh, e.logistic])
def test_functions_at_the_ends(vulkan: VulkanEngine, function: Any) -> None:
    """Infinities, NaN, 0 and the edges of overflow are as in NumPy."""
    x = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 1, -1, 88.7, 88.8, -86.9, -104, 1e4, -1e4, 3e38, -3e38], np.float32)
    got, want = on_device(vulkan, function(A), x, x), evaluate([function(A)], a=x)[0]
    special = ~np.isfinite(want) | (np.abs(want) < 2.0**-126)
    assert np.array_equal(got[special], np.where(np.abs(want) < 2.0**-126, 0, want)[special], equal_nan=True)
    assert np.all(
        np.abs(got[~special] - want[~special]) <= 200 * 2.0**-24 * np.maximum(np.abs(want[~special]), 2.0**-100)
    )


@pytest.mark.parametrize("wide", [True, False])
def test_tanh_to_the_last_places(vulkan: VulkanEngine, cpu: CpuEngine, wide: bool) -> None:
    """Its error is 4 units of the result, where exp(-2 |x|) alone would leave 3e-8 at 1e-30; 0 keeps its sign."""
    rng = np.random.default_rng(3)
    sizes = [
        10.0 ** rng.uniform(-30, 1, 20_000),
        rng.uniform(0.4, 0.7, 20_000),
        [0.5625, 0.0, 2.0**-126, 9.5, 40.0, np.inf],
    ]
    size = np.concatenate(sizes).astype(np.float32)
    x = np.concatenate([size, -size])
    want = np.tanh(x.astype(np.float64))
    for got in (on_device(vulkan, e.tanh(A), x, x, wide), cpu.map(e.tanh(A), a=cpu.tensor(x)).numpy()):
        assert np.all(np.abs(got - want) <= 4 * np.spacing(np.abs(want).astype(np.float32)))
        assert np.abs(got).max() == 1 and np.array_equal(np.signbit(got), np.signbit(x))


def test_the_slope_of_tanh(vulkan: VulkanEngine) -> None:
    """1 - tanh(x)^2, accurate where tanh(x) is nearly 1."""
    size = 10.0 ** np.linspace(-30, 1, 1001)
    x = np.concatenate([size, -size, [0.0]]).astype(np.float32)
    want = np.cosh(x.astype(np.float64)) ** -2
    got = on_device(vulkan, derivative(e.tanh(A), A), x, x)
    assert np.all(np.abs(got - want) <= 50 * 2.0**-24 * want)


def test_text() -> None:
    """Common parts have one name, the text depends on the expression alone, names do not collide, both kinds."""
    t0 = e.variable("t0")
    shared = e.exp(A) + t0
    text = glsl_statements({"y": shared * shared}, "float")
    assert text == "const float t1 = (exp_full(a) + t0);\ny = (t1 * t1);"
    swap = glsl_statements({"a": B + 1.0, "b": A * B}, "vec4")
    assert swap.index("(a * b)") < swap.index("a = t0") and "const vec4 t0 = (b + vec4(1.0));" in swap
    plain_swap = glsl_statements({"a": B, "b": A}, "float").splitlines()
    assert plain_swap == ["const float t0 = b;", "const float t1 = a;", "a = t0;", "b = t1;"]
    for kind in KINDS:
        text = glsl_statements({"y": e.tanh(A)}, kind)
        assert text.count("exp_or_zero") == 1 and not re.search(r"\btanh\(", text)
    assert glsl_statements({"y": A * e.constant(np.inf)}, "float") == "y = (a * uintBitsToFloat(0x7F800000u));"


def test_choices_of_a_whole_dispatch_are_branches() -> None:
    """What is not chosen is neither loaded nor computed; a choice by the elements stays where it is."""
    some, chosen = e.whole("some"), e.variable("chosen0")
    value = e.where(e.same(some, 1), A + B, A)
    root = e.where(e.below(some, 2) & e.same(some, some), e.where(value < 0.0, chosen, value), e.exp(value))
    expected = """
        float chosen1;
        if ((args.some == 1u)) { chosen1 = (a + args.b.v[i]); } else { chosen1 = a; }
        float chosen2;
        if (((args.some < 2u) && (args.some == args.some))) { chosen2 = mix(chosen1, chosen0, (chosen1 < 0.0)); }
        else { chosen2 = exp_full(chosen1); }
        y = chosen2;
    """
    names = {"b": "args.b.v[i]", "some": "args.some"}
    assert glsl_branches("y", root, names).split() == expected.split()


def test_two_outputs_in_place(vulkan: VulkanEngine) -> None:
    """Each output is computed from the inputs as they were; a scalar of the kernel is a variable."""
    kernel = MapKernel("swap", ("a", "b"), ("a", "b"), {"a": B * e.variable("factor"), "b": A}, scalars="float factor")
    x, y = vulkan.tensor(np.arange(9.0)), vulkan.tensor(np.ones(9))
    kernel.launch(vulkan, 9, x, y, 3.0)
    assert x.numpy().tolist() == [3.0] * 9
    assert y.numpy().tolist() == list(range(9))


@pytest.mark.parametrize("wide", [True, False])
def test_random_numbers_are_numpys(vulkan: VulkanEngine, wide: bool) -> None:
    """Both kernels and NumPy draw the same bits: a function of seed, step, micro-batch, site and element."""
    site, limit = e.whole("site"), e.whole("limit")
    root = e.where(e.random_below(limit, site), -1.0, e.uniform(site)) + e.uniform(7) * A
    kernel = MapKernel("draw", ("a",), ("y",), {"y": root}, scalars="uint site, uint limit")
    step = StepParameters(seed=0xFEDCBA9876543210, step=5, micro_batch=3)
    vulkan.set_step_parameters(step)
    a = np.full(4099, 0.25, np.float32)
    x, y = vulkan.tensor(a), vulkan.zeros((a.size,))
    kernel.launch(vulkan, a.size, x, y, 11, 2**30, wide=wide)
    got = y.numpy()
    want = kernel.reference(a=a, site=11, limit=2**30, step=step)[0]
    assert np.array_equal(got, want)
    assert abs((got < -0.5).mean() - 0.25) < 0.04 and got.max() < 1.25
    shaped = evaluate([root], a=a[:4096].reshape(64, 64), site=11, limit=2**30, step=step)[0]
    assert np.array_equal(shaped.ravel(), got[:4096])
    other = evaluate([root], a=a, site=12, limit=2**30, step=step)[0]
    assert (other != got).mean() > 0.9


def test_uniform_is_uniform() -> None:
    """Mean and variance of 2^16 draws within 5 standard deviations, and all of them multiples of 2^-24 below 1."""
    u = evaluate([e.uniform(3) + 0.0 * A], a=np.zeros(2**16), step=StepParameters(seed=1))[0]
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / u.size)
    assert np.array_equal(u * 2**24, np.trunc(u * 2**24)) and u.min() >= 0 and u.max() < 1


@WORK
@given(outer=SMOOTH, inner=SMOOTH)
def test_substitute_is_a_chain(outer: e.Expr, inner: e.Expr) -> None:
    """Putting one expression into another is computing one after the other, to the bit."""
    a, b = np.random.default_rng(2).uniform(-2, 2, (2, 40)).astype(np.float32)
    joined = substitute([outer], {A: inner})[0]
    between = evaluate([inner], a=a, b=b)[0]
    assert np.array_equal(evaluate([joined], a=a, b=b)[0], evaluate([outer], a=between, b=b)[0])


def test_select_takes_the_first_that_holds() -> None:
    root = e.select([A < 0.0, A < 1.0], [10.0, 20.0], A)
    assert evaluate([root], a=np.array([-1, 0, 0.5, 1, 2, np.nan]))[0][:5].tolist() == [10, 20, 20, 1, 2]
    with pytest.raises(ValueError, match="longer"):
        e.select([A < 0.0], [1.0, 2.0], A)


def test_misuse_is_refused() -> None:
    with pytest.raises(TypeError, match="truth value"):
        max(A, B)
    with pytest.raises(ValueError, match="conditions go into where"):
        (A < B) + 1.0
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        e.cast(A, "int8")
    with pytest.raises(ValueError, match="no value for variable 'b'"):
        evaluate([A + B], a=np.zeros(2))
    with pytest.raises(ValueError, match="no variable"):
        derivative(A, e.constant(1.0))
    for name in ("a b", "index", "gl_x", "a__b", "2a"):
        with pytest.raises(ValueError, match="cannot name"):
            e.variable(name)
    with pytest.raises(ValueError, match="no operation 'and'"):
        (A < B) & A
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        e.uniform(-1)
    for wrong in (0.25, 3.0, True, None, np.float32(1)):
        for call in (e.whole, e.uniform, lambda n: e.random_below(n, 1), lambda n: e.random_below(1, n)):
            with pytest.raises(ValueError, match="is no whole number"):
                call(wrong)
    for big in (2**32, np.int64(-1), np.uint64(2**63)):
        with pytest.raises(ValueError, match="does not fit 32 bits"):
            e.random_below(big, 1)
    assert e.whole(np.uint32(7)) is e.whole(7)
    with pytest.raises(ValueError, match=r"compared with equal\(\)"):
        e.where(A == B, 1.0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one string"):
        pullback(A, ["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole numbers into same"):
        e.make("add", e.whole("n"), A)
    with pytest.raises(ValueError, match="step="):
        evaluate([e.uniform(1) * A], a=np.zeros(2))
    with pytest.raises(ValueError, match="different kinds"):
        substitute([A + B], {A: A < B})
