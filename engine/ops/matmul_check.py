"""Before a kernel of matmul is first used on a device: does it give what the base variant gives on a small odd case?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..dtypes import rounded
from ..matmul_choice import MatmulChooser
from ..matmul_variants import Choice, Product, Variant, variants
from .matmul_launch import ALONG_K, PLAIN, Epilogue, Layout, Pairs, matmul_kernel, plan_of, run_plan

if TYPE_CHECKING:
    from ..recorder import Recorder

_M, _N, _K = 37, 70, 19
_PAIRED_M, _PAIRED_K = 38, 12
_GUARD = 64  # words around C
# NN, and TT with the epilogue: (layout, swapped, epilogue)
_CASES = (
    (Layout(Product(1, _M, _N, _K), 0, 0, _K, 1, 1, _N), False, False),
    (Layout(Product(1, _M, _N, _K), 0, 0, 1, _M, _K, 1), True, True),
)


def _cases(pairs: Pairs) -> tuple[tuple[Layout, bool, bool], ...]:
    """Odd cases, or with pairs even ones that are read so."""
    if pairs == PLAIN:
        return _CASES
    a = (_PAIRED_K, 1) if pairs.a == ALONG_K else (1, _PAIRED_M)
    b = (_PAIRED_K, 1) if pairs.b == ALONG_K else (1, _N)
    layout = Layout(Product(1, _PAIRED_M, _N, _PAIRED_K), 0, 0, *a, *b)
    return (layout, False, False), (layout, False, True)


def checked(gpu: Recorder, chooser: MatmulChooser, variant: Variant, resumes: bool, pairs: Pairs = PLAIN) -> bool:
    """Whether a variant's kernel is known to be right; compares it now when that is not known, and bars a wrong one."""
    kernel = matmul_kernel(variant, gpu.subgroup_size, resumes, pairs)
    if kernel.name in chooser.table.checked:
        return True
    base = variants(chooser.device, variant.split)
    if base and (variant != base[-1] or pairs != PLAIN):
        wrong = _compare(gpu, chooser, variant, base[-1], resumes, pairs)
        if wrong:
            chooser.bar(variant.name, wrong)
            return False
    chooser.table.note_checked(kernel.name)
    return True


def _compare(
    gpu: Recorder, chooser: MatmulChooser, variant: Variant, base: Variant, resumes: bool, pairs: Pairs
) -> str:
    """What differs, in words; "" when nothing does. The base variant gets operands that are rounded already.

    Cooperative matrices add up in an order of their own: there the bound of k sums decides (Higham 2002, 3.5).
    """
    rng = np.random.default_rng(7)
    cases = _cases(pairs)
    _, m, n, k = cases[0][0].product
    sizes = {"a": m * k, "b": k * n, "bias": n, "residual": m * n, "c": m * n + 2 * _GUARD}
    inputs = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    starts = dict(zip(sizes, np.cumsum([0, *(-(-size // 4) * 4 for size in sizes.values())]).tolist(), strict=False))
    total = 4 * (starts["c"] + sizes["c"])
    aside = gpu.aside()
    try:
        buffer = aside.own_buffer(total, host_visible=True)
        memory = np.frombuffer(buffer.mapping, np.float32, total // 4)
        where = {name: buffer.address + 4 * start for name, start in starts.items()}

        def result(tile: Variant, read: Pairs, layout: Layout, swapped: bool, epilogue: bool) -> np.ndarray:
            for name, array in inputs.items():
                values = rounded(array, variant.precision) if tile is base and name in ("a", "b") else array
                memory[starts[name] : starts[name] + sizes[name]] = values
            plan = plan_of(aside, chooser.device, layout, Choice(tile, swapped), read)
            ends = Epilogue(accumulate=resumes)
            if epilogue:
                ends = Epilogue(where["bias"], where["residual"], "gelu", resumes)
            run_plan(aside, plan, layout, where["a"], where["b"], where["c"] + 4 * _GUARD, ends)
            aside.submit()
            aside.wait()
            return memory[starts["c"] :].copy()

        for layout, swapped, epilogue in cases:
            got = result(variant, pairs, layout, swapped, epilogue)
            expected = result(base, PLAIN, layout, swapped, epilogue)
            same = got.view(np.uint32) == expected.view(np.uint32)
            if variant.spread == "matrix":  # |a|, |b| and |c| are below 5, slopes of gelu below 1.2
                same |= np.abs(got - expected) <= 1.2 * 2 * (k + 2) * 2.0**-24 * (25.0 * k + 10.0)
            differs = np.flatnonzero(~same) - _GUARD
            if len(differs):
                place = divmod(int(differs[0]), n)
                values = f"{got[differs[0] + _GUARD]!r} instead of {expected[differs[0] + _GUARD]!r}"
                return f"{len(differs)} of {m * n} elements differ from {base.name}, the first at {place}: {values}"
        return ""
    finally:
        aside.close()
