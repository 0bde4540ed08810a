"""Kernels of matmul and how a product is dispatched: strides for every transposition, slices for a long k."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..kernel import Kernel, read_shader
from ..matmul_variants import Capabilities, Choice, Product, Variant, tiles_of
from ..tensor import Tensor
from .activation import ACTIVATIONS, activation_glsl

if TYPE_CHECKING:
    from ..recorder import Recorder

_ARGS = (
    "in f32 a, in f32 b, inout f32 c, in f32 bias, in f32 residual, uint m, uint n, uint k, uint batch, uint batch_a, "
    "uint batch_b, uint a_row, uint a_k, uint b_col, uint b_k, uint c_row, uint c_col, uint tiles_m, uint tiles_n, "
    "uint activation, uint flags"
)
# Without a batch, and with what normalises one operand: 120 bytes.
_NORM_ARGS = (
    "in f32 a, in f32 b, inout f32 c, in f32 bias, in f32 residual, in f32 norm_mean, in f32 norm_rstd, "
    "in f32 norm_weight, in f32 norm_bias, uint m, uint n, uint k, uint a_row, uint a_k, uint b_col, uint b_k, "
    "uint c_row, uint c_col, uint tiles_m, uint tiles_n, uint activation, uint flags"
)
_BIAS, _RESIDUAL, _BIAS_BY_ROW = 1, 2, 4  # bits of `flags`
# Of k in one dispatch. lavapipe 22.3 silently ends an invocation's loops after 65,535 rounds in all.
MAX_SLICE = 2**15


def _each(variant: Variant, index: str, count: int) -> str:
    if variant.written:
        return " ".join(f"F({i}, x)" for i in range(count))
    return f"[[unroll]] for (uint {index} = 0; {index} < {count}; ++{index}) {{ F({index}, x) }}"


class Pairs(NamedTuple):
    """How a lane reads two neighbours in A and in B as one 64-bit word: ALONG_K or ACROSS it; 0: it does not."""

    a: int = 0
    b: int = 0


class NormKind(NamedTuple):
    """A norm that an operand goes through on the way in: number as in shaders/matmul.comp, 1 RMSNorm, 2 LayerNorm.

    of_b: the kernel's B and not its A; along_k: the norm's rows lie along k.
    """

    number: int
    of_b: bool
    along_k: bool


ALONG_K, ACROSS = 1, 2  # as in shaders/matmul.comp
PLAIN = Pairs()
ALL_PAIRS = tuple(Pairs(a, b) for a in (ALONG_K, ACROSS) for b in (ALONG_K, ACROSS))
PAIRS_SUBGROUP = 8  # lavapipe's with 256-bit vectors: what pair kernels are compiled ahead of time for
_BATCH = 64  # rows that are fetched together, of operands that lie across k: 24 KiB of a 32 x 64 tile, within L1
_PAIRS_PAY = 2**17  # multiply-adds from which a kernel more is worth compiling


def _touches(width: int) -> int:
    """Loads, a lane a cache line of 16 elements, that bring _BATCH rows of this width."""
    return _BATCH * -(-width // 16) // PAIRS_SUBGROUP


def has_pairs(variant: Variant, pairs: Pairs) -> bool:
    """Whether the tile can be read in such pairs."""
    slots = -(-variant.tm // PAIRS_SUBGROUP)
    fits = (pairs.a == ALONG_K or slots % 2 == 0) and (pairs.b == ALONG_K or variant.tn % 2 == 0)
    return fits and variant.spread == "shuffle" and variant.unroll % 2 == 0


_MATRIX_EXTENSIONS = (
    "GL_KHR_cooperative_matrix",
    "GL_KHR_memory_scope_semantics",
    "GL_EXT_shader_explicit_arithmetic_types_float16",
)
_ROUND = {"float32": "(x)", "float16": "round_to_half(x)", "bfloat16": "round_to_bfloat(x)"}


def _workgroup_kernel(name: str, variant: Variant, subgroup_size: int, resumes: bool) -> Kernel:
    """The kernel of a tile of a whole workgroup."""
    defines: dict[str, int | float | str] = {
        "MATRIX": 0,
        "ROLLED": int(variant.written),
        "RESUMES": int(resumes),
        "ROUND(x)": _ROUND[variant.precision],
    }
    text = activation_glsl() + read_shader("matmul_shared.comp")
    if variant.spread == "shared":
        return Kernel(name, text, _ARGS, local_size=128, defines=defines)
    waves_n = 2 if subgroup_size == 32 else 1
    defines |= {"MATRIX": 1, "WAVES_N": waves_n, "FRAGMENTS_M": 2, "FRAGMENTS_N": 4 // waves_n}
    text = "#pragma use_vulkan_memory_model\n" + text
    subgroups = 128 // subgroup_size
    return Kernel(name, text, _ARGS, subgroups=subgroups, defines=defines, extensions=_MATRIX_EXTENSIONS)


@cache
def matmul_kernel(
    variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, norm: NormKind | None = None
) -> Kernel:
    """The kernel of a tile for a subgroup size. resumes: sums go on from C; apart, because its loads take compiling."""
    size = "" if variant.spread == "shared" else f"_s{subgroup_size}"
    name = f"matmul_{variant.name}{size}{'_more' * resumes}"
    if variant.whole_workgroup:
        return _workgroup_kernel(name, variant, subgroup_size, resumes)
    a_loads = variant.tm if variant.spread == "load" else -(-variant.tm // subgroup_size)
    defines: dict[str, int | float | str] = {
        "SIZE": subgroup_size,
        "TM": variant.tm,
        "TN": variant.tn,
        "UNROLL_K": variant.unroll,
        "SPLIT": variant.split,
        "RESUMES": int(resumes),
        "A_LOADS": a_loads,
        "PAIR_A": pairs.a,
        "PAIR_B": pairs.b,
        "BATCH": _BATCH,
        "TOUCH_A": _touches(variant.tm) if pairs.a == ACROSS else 0,
        "TOUCH_B": _touches(variant.tn * subgroup_size) if pairs.b == ACROSS else 0,
        "NORM": norm.number if norm is not None else 0,
        "EACH_ROW(F, x)": _each(variant, "each_row", variant.tm),
        "EACH_COLUMN(F, x)": _each(variant, "each_column", variant.tn),
        "EACH_A(F, x)": _each(variant, "each_a", a_loads),
        "EACH_K(F, x)": _each(variant, "each_k", variant.unroll),
    }
    if variant.spread != "load":
        defines[f"SPREAD_{variant.spread.upper()}"] = 1
    text = activation_glsl() + read_shader("matmul.comp")
    subgroups = variant.split if variant.split > 1 else variant.subgroups
    if pairs != PLAIN:
        defines["WORDS64"] = 1
        name += f"_pairs{pairs.a}{pairs.b}"
    if norm is None:
        return Kernel(name, text, _ARGS, subgroups=subgroups, defines=defines)
    defines |= {"NORM_OF_B": int(norm.of_b), "NORM_ALONG_K": int(norm.along_k)}
    name += f"_{('rms', 'layer')[norm.number - 1]}_norm_of_{'ab'[norm.of_b]}{'_along_k' * norm.along_k}"
    return Kernel(name, text, _NORM_ARGS, subgroups=subgroups, defines=defines)


Address: TypeAlias = Tensor | int  # a tensor, or where it lies


class Layout(NamedTuple):
    """A product and where its operands lie, in elements: A [m, k] and B [k, n], C [m, n] contiguous."""

    product: Product
    batch_a: int
    batch_b: int
    a_row: int
    a_k: int
    b_col: int
    b_k: int


class Epilogue(NamedTuple):
    """What follows the sum: residual + activation(sum + bias); accumulate: the sum goes on from C."""

    bias: Address | None = None
    residual: Address | None = None
    activation: str | None = None
    accumulate: bool = False


class Norm(NamedTuple):
    """The norm of A (of the product, not of the kernel): x * rstd * weight, or with mean and bias LayerNorm's."""

    rstd: Address
    weight: Address
    mean: Address | None = None
    bias: Address | None = None


class Plan(NamedTuple):
    """All of a dispatch that the layout and the choice decide."""

    kernel: Kernel
    more: Kernel  # goes on with what C holds
    num_groups: int
    swapped: bool
    sizes: tuple[int, ...]  # the kernel's scalars from `m` on, k, activation and flags left out
    norm: NormKind | None = None


def pairs_of(gpu: Recorder, layout: Layout, choice: Choice) -> Pairs:
    """The pairs a product is read in where both operands start on 8 bytes: PLAIN unless that pays on this device."""
    product, variant = layout.product, choice.variant
    if not gpu.in_words or gpu.subgroup_size != PAIRS_SUBGROUP or product.work < _PAIRS_PAY:
        return PLAIN
    a = _pair(layout.batch_a, layout.a_row, layout.a_k, product.m)
    b = _pair(layout.batch_b, layout.b_col, layout.b_k, product.n)
    pairs = Pairs(b, a) if choice.swapped else Pairs(a, b)
    return pairs if a and b and product.k % variant.unroll == 0 and has_pairs(variant, pairs) else PLAIN


def _pair(batch: int, across: int, along_k: int, size: int) -> int:
    if batch % 2:
        return 0
    if along_k == 1 and across % 2 == 0:
        return ALONG_K
    return ACROSS if across == 1 and along_k % 2 == 0 and size % 2 == 0 else 0


def plan_of(
    gpu: Recorder, device: Capabilities, layout: Layout, choice: Choice, pairs: Pairs = PLAIN, norm: int = 0
) -> Plan:
    """The dispatch that carries out a product with this choice, read in these pairs. norm: 1 RMSNorm of A, 2 LayerNorm
    (no batch, and no tile of a whole workgroup)."""
    variant, (batch, m, n, _) = choice.variant, layout.product
    kind = NormKind(norm, choice.swapped, layout.a_k != 1) if norm else None
    kernel = matmul_kernel(variant, gpu.subgroup_size, False, pairs, kind)
    tiles_m, tiles_n = tiles_of(device, layout.product, choice)
    a, b = (layout.batch_a, layout.a_row, layout.a_k), (layout.batch_b, layout.b_col, layout.b_k)
    rows, columns, c = m, n, (n, 1)
    if choice.swapped:
        a, b, rows, columns, c = b, a, n, m, (1, n)
    tiles = batch * tiles_m * tiles_n
    if variant.split == 1 and not variant.whole_workgroup:
        tiles = -(-tiles // (kernel.workgroup_size(gpu.subgroup_size, gpu.max_invocations) // gpu.subgroup_size))
    batched = () if norm else (batch, a[0], b[0])
    sizes = (rows, columns, *batched, *a[1:], *b[1:], *c, tiles_m, tiles_n)
    more = matmul_kernel(variant, gpu.subgroup_size, True, pairs, kind)
    return Plan(kernel, more, tiles, choice.swapped, sizes, kind)


def _after(start: Address, elements: int) -> Address | tuple[Tensor, int]:
    if not elements:
        return start
    return start + 4 * elements if isinstance(start, int) else (start, 4 * elements)


def _norm_pointers(norm: Norm, along_k: bool, begin: int, unused: Address) -> list[Any]:
    """mean, rstd, weight, bias from element `begin` of those that k goes along."""
    mean, bias = (unused if x is None else x for x in (norm.mean, norm.bias))
    rows, columns = (begin, 0) if along_k else (0, begin)
    return [_after(mean, rows), _after(norm.rstd, rows), _after(norm.weight, columns), _after(bias, columns)]


def run_plan(
    gpu: Recorder,
    plan: Plan,
    layout: Layout,
    a: Address,
    b: Address,
    c: Address,
    epilogue: Epilogue,
    norm: Norm | None = None,
) -> None:
    """Record a product. norm: where the plan has one."""
    bias, residual, activation, accumulate = epilogue
    final = _BIAS * (bias is not None) | _RESIDUAL * (residual is not None) | _BIAS_BY_ROW * plan.swapped
    kind = ACTIVATIONS[activation] if activation is not None else 0
    rows, columns, *rest = plan.sizes
    total = layout.product.k
    begin = 0
    while True:
        length = min(total - begin, MAX_SLICE)
        last = begin + length == total
        first_a, first_b = _after(a, begin * layout.a_k), _after(b, begin * layout.b_k)
        gpu.dispatch(
            plan.more if accumulate or begin else plan.kernel,
            plan.num_groups,
            first_b if plan.swapped else first_a,
            first_a if plan.swapped else first_b,
            c,
            c if bias is None else bias,
            c if residual is None else residual,
            *(_norm_pointers(norm, plan.norm.along_k, begin, c) if norm is not None and plan.norm is not None else ()),
            rows,
            columns,
            length,
            *rest,
            kind * last,
            final if last else _BIAS_BY_ROW * plan.swapped,
        )
        begin += length
        if last:
            return
