"""Kernels of matmul and how a product is dispatched: strides for every transposition, slices for a long k."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..capabilities import Capabilities
from ..fold import FoldSpec
from ..glsl_compiler import BFLOAT_PRAGMA
from ..kernel import Kernel, read_shader
from ..kernel_text import KernelText, key_of
from ..matmul_variants import Choice, Product, Variant, tiles_of
from ..tensor import Tensor
from .activation import ACTIVATIONS
from .matmul_parts import (
    HAS_BIAS,
    HAS_RESIDUAL,
    LAST,
    SWAPPED,
    USUAL,
    OwnEpilogue,
    Parts,
    Prologue,
    kernel_arguments,
    operands_of,
    parts_glsl,
    parts_includes,
)

if TYPE_CHECKING:
    from ..recorder import Recorder

_ARGS = kernel_arguments(USUAL)
# Of k in one dispatch. lavapipe 22.3 silently ends an invocation's loops after 65,535 rounds in all.
# With two of k a round and both operands touched, whose loops it enters once even where they are skipped: 62,464.
MAX_SLICE = 2**15


def _each(variant: Variant, index: str, count: int) -> str:
    if variant.written:
        return " ".join(f"F({i}, x)" for i in range(count))
    return f"[[unroll]] for (uint {index} = 0; {index} < {count}; ++{index}) {{ F({index}, x) }}"


class Pairs(NamedTuple):
    """How a lane reads two neighbours in A and in B as one 64-bit word: ALONG_K or ACROSS it; 0: it does not."""

    a: int = 0
    b: int = 0


ALONG_K, ACROSS = 1, 2  # as in shaders/matmul.comp
PLAIN = Pairs()
ALL_PAIRS = tuple(Pairs(a, b) for a in (ALONG_K, ACROSS) for b in (ALONG_K, ACROSS))
PAIRS_SUBGROUP = 8  # lavapipe's with 256-bit vectors: what pair kernels are compiled ahead of time for
_BATCH = 64  # rows that are fetched together, of operands that lie across k: 24 KiB of a 32 x 64 tile, within L1
_GROUP = 8  # rows of tiles that are walked together: of 32 x 1,024 elements of A each, 1 MiB
_BLOCK = 4  # columns of B of a round that stay in registers: times 4 values of k, half of AVX-512's
_SLICE, _SLICING_PAYS = 1024, 2**28  # of k; multiply-adds from which another kernel is worth compiling
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


_MEMORY_MODEL = "#pragma use_vulkan_memory_model\n"


@lru_cache(maxsize=256)
def _key_of(parts: Parts) -> str:
    return hashlib.blake2b(key_of(parts).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=256)  # many tiles share one text
def _text(shader: str, parts: Parts, before: str = "") -> KernelText:
    return KernelText((shader, _key_of(parts), before), lambda: before + parts_glsl(parts) + read_shader(shader))


def _workgroup_kernel(name: str, variant: Variant, subgroup_size: int, resumes: bool, parts: Parts) -> Kernel:
    """The kernel of a tile of a whole workgroup."""
    defines = variant.workgroup_tile.defines(subgroup_size) | {
        "ROLLED": int(variant.written),
        "RESUMES": int(resumes),
        "ROUND(x)": _ROUND[variant.precision],
        "WITH_EXPR": int("expr.glsl" in parts_includes(parts)),
    }
    bfloat = variant.precision == "bfloat16" and variant.matrix is not None
    text = _text("matmul_shared.comp", parts, _MEMORY_MODEL * (variant.matrix is not None) + BFLOAT_PRAGMA * bfloat)
    arguments, invocations = kernel_arguments(parts), variant.workgroup_tile.invocations
    if variant.matrix is None:
        return Kernel(name, text, arguments, local_size=invocations, defines=defines, family="matmul")
    defines |= {"BFLOAT": int(bfloat)}
    subgroups = invocations // subgroup_size
    return Kernel(
        name, text, arguments, subgroups=subgroups, defines=defines, extensions=_MATRIX_EXTENSIONS, family="matmul"
    )


@cache
def matmul_kernel(
    variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, parts: Parts = USUAL
) -> Kernel:
    """The kernel of a tile for a subgroup size. resumes: sums go on from C; apart, because its loads take compiling."""
    size = "" if variant.spread == "shared" else f"_s{subgroup_size}"
    name = f"matmul_{variant.name}{size}{'_more' * resumes}"
    if parts.epilogue is not None:  # profiles tell one from another
        name += f"_{_key_of(parts)[:8]}"
    if variant.whole_workgroup:
        return _workgroup_kernel(name, variant, subgroup_size, resumes, parts)
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
        "GROUP": _GROUP if variant.spread == "shuffle" else 0,
        "BLOCK": min(variant.tn, _BLOCK) if variant.spread == "shuffle" else 0,
        "BATCH": _BATCH,
        "TOUCH_A": _touches(variant.tm) if pairs.a == ACROSS else 0,
        "TOUCH_B": _touches(variant.tn * subgroup_size) if pairs.b == ACROSS else 0,
        "PROLOGUE": int(parts.prologue is not None),
        "EACH_ROW(F, x)": _each(variant, "each_row", variant.tm),
        "EACH_COLUMN(F, x)": _each(variant, "each_column", variant.tn),
        "EACH_A(F, x)": _each(variant, "each_a", a_loads),
        "EACH_K(F, x)": _each(variant, "each_k", variant.unroll),
    }
    if variant.spread != "load":
        defines[f"SPREAD_{variant.spread.upper()}"] = 1
    if pairs != PLAIN:
        defines["WORDS64"] = 1
        name += f"_pairs{pairs.a}{pairs.b}"
    if parts.prologue is not None:
        fold, of_b, along_k = parts.prologue
        defines |= {"PROLOGUE_OF_B": int(of_b)}
        name += f"_{fold.name}_of_{'ab'[of_b]}{'_along_k' * along_k}"
    text = _text("matmul.comp", parts)
    subgroups = variant.split if variant.split > 1 else variant.subgroups
    return Kernel(name, text, kernel_arguments(parts), subgroups=subgroups, defines=defines, family="matmul")


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
    """What follows the sum: residual + activation(sum + bias); accumulate: the sum goes on from C.

    operands, numbers: of the plan's own epilogue, where it has one, in order.
    """

    bias: Address | None = None
    residual: Address | None = None
    activation: str | None = None
    accumulate: bool = False
    operands: Sequence[Address] = ()
    numbers: Sequence[float] = ()


class Plan(NamedTuple):
    """All of a dispatch that the layout and the choice decide."""

    kernel: Kernel
    more: Kernel  # goes on with what C holds
    num_groups: int
    swapped: bool
    sizes: tuple[int, ...]  # the kernel's scalars from `m` on, k, activation and flags left out
    parts: Parts = USUAL
    slice: int = MAX_SLICE  # of k in one dispatch


def slice_of(device: Capabilities, product: Product) -> int:
    """How much of a long k one dispatch goes through; the next goes on with what C holds, so no bit depends on it.

    On lavapipe a tile's panels of A and B should stay in a core's cache: slices of about 1,024 took 0.88 of the time
    of one dispatch at 1752 x 4720 x 584.
    """
    parts = round(product.k / _SLICE)
    if device.driver != "llvmpipe" or parts < 2 or product.work < _SLICING_PAYS:
        return MAX_SLICE
    return -(-product.k // parts // _BATCH) * _BATCH


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
    gpu: Recorder,
    device: Capabilities,
    layout: Layout,
    choice: Choice,
    pairs: Pairs = PLAIN,
    prologue: FoldSpec | None = None,
    epilogue: OwnEpilogue | None = None,
    *,
    along_k: bool = False,
) -> Plan:
    """The dispatch that carries out a product with this choice, read in these pairs. prologue: of A (no batch, and no
    tile of a whole workgroup), whose rows lie along k or do not. epilogue: instead of the usual one."""
    variant, (batch, m, n, _) = choice.variant, layout.product
    parts = Parts(None if prologue is None else Prologue(prologue, choice.swapped, along_k), epilogue)
    kernel = matmul_kernel(variant, gpu.subgroup_size, False, pairs, parts)
    tiles_m, tiles_n = tiles_of(device, layout.product, choice)
    a, b = (layout.batch_a, layout.a_row, layout.a_k), (layout.batch_b, layout.b_col, layout.b_k)
    rows, columns, c = m, n, (n, 1)
    if choice.swapped:
        a, b, rows, columns, c = b, a, n, m, (1, n)
    tiles = batch * tiles_m * tiles_n
    if variant.split == 1 and not variant.whole_workgroup:
        tiles = -(-tiles // (kernel.workgroup_size(gpu.subgroup_size, gpu.max_invocations) // gpu.subgroup_size))
    batched = () if prologue is not None else (batch, a[0], b[0])
    sizes = (rows, columns, *batched, *a[1:], *b[1:], *c, tiles_m, tiles_n)
    more = matmul_kernel(variant, gpu.subgroup_size, True, pairs, parts)
    return Plan(kernel, more, tiles, choice.swapped, sizes, parts, slice_of(device, layout.product))


def _after(start: Address, elements: int) -> Address | tuple[Tensor, int]:
    if not elements:
        return start
    return start + 4 * elements if isinstance(start, int) else (start, 4 * elements)


def _prologue_pointers(prologue: Prologue, operands: Sequence[Address], begin: int) -> list[Any]:
    """A prologue's operands, from element `begin` on of those that k goes along."""
    by_k = "value" if prologue.along_k else "column"
    kinds = [kind for _, kind in operands_of(prologue.fold)]
    return [_after(x, begin if kind == by_k else 0) for x, kind in zip(operands, kinds, strict=True)]


def run_plan(
    gpu: Recorder,
    plan: Plan,
    layout: Layout,
    a: Address,
    b: Address,
    c: Address,
    epilogue: Epilogue,
    operands: Sequence[Address] = (),
) -> None:
    """Record a product. operands: of the plan's prologue, in order."""
    bias, residual, activation, accumulate, pointers, numbers = epilogue
    prologue, own = plan.parts
    swapped = SWAPPED * plan.swapped
    middle: tuple[float, ...]  # what comes behind the sizes, in a slice of k and in the last one
    end: tuple[float, ...]
    if own is None:
        pointers = (c if bias is None else bias, c if residual is None else residual)
        flags = HAS_BIAS * (bias is not None) | HAS_RESIDUAL * (residual is not None) | swapped
        middle, end = (0, swapped), (ACTIVATIONS[activation] if activation is not None else 0, flags)
    else:
        middle, end = (swapped, *numbers), (swapped | LAST, *numbers)
    rows, columns, *rest = plan.sizes
    total = layout.product.k
    begin, work = 0, gpu.op_work
    while True:
        length = min(total - begin, plan.slice)
        last = begin + length == total
        if total > plan.slice:
            gpu.op_work = work * length / total  # what the recorder splits a dispatch by
        first_a, first_b = _after(a, begin * layout.a_k), _after(b, begin * layout.b_k)
        gpu.dispatch(
            plan.more if accumulate or begin else plan.kernel,
            plan.num_groups,
            first_b if plan.swapped else first_a,
            first_a if plan.swapped else first_b,
            c,
            *pointers,
            *(() if prologue is None else _prologue_pointers(prologue, operands, begin)),
            rows,
            columns,
            length,
            *rest,
            *(end if last else middle),
        )
        begin += length
        if last:
            gpu.op_work = work
            return
