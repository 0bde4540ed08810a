"""The family of matmul kernels, and which one a product takes: a pure function of op, shape and device.

A variant is a tile of one subgroup: each lane accumulates `tm` rows by `tn` columns of C (shaders/matmul.comp). Every
element of C is one fma chain over k in every variant with split 1: the choice changes time and nothing else. `split`
is the accumulation order, a function of shape and device alone (`split_of`); no tuning chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from .capabilities import FRAGMENTS, Capabilities
from .physical_device import MatrixShape
from .workgroup_tile import WorkgroupTile

SUBGROUP_SIZES = (4, 8, 16, 32, 64)
PRECISIONS = ("float32", "float16", "bfloat16")  # of the operands; sums are float32
_MIN_INVOCATIONS = 128  # a workgroup, on any Vulkan device


class _Variant(NamedTuple):
    spread: str
    tm: int
    tn: int
    unroll: int = 1
    subgroups: int = 1
    split: int = 1
    written: bool = False
    least_work: int = 0
    precision: str = "float32"
    matrix: MatrixShape | None = None


class Variant(_Variant):
    """A tile of tm rows by tn columns a lane; unroll: values of k a round; subgroups: of a workgroup.

    spread: how a value of A reaches all lanes: "shuffle", "broadcast", or "load" (each lane loads it); or the tile is a
    workgroup's: "shared" (operands staged in shared memory) or "matrix" (and multiplied by cooperative matrices, of the
    shape `matrix`).
    split: parts of k that subgroups of a workgroup sum up apart. written: for a driver that does badly at unrolling
    loops: written out, or in the tile of a workgroup left rolled. least_work: products below this many multiply-adds
    leave it aside, because its compilation would not pay. precision: what operands are rounded to.
    """

    @property
    def whole_workgroup(self) -> bool:
        """Whether the tile is a workgroup's and not a subgroup's."""
        return self.spread in ("shared", "matrix")

    @property
    def workgroup_tile(self) -> WorkgroupTile:
        """The tile of a workgroup in numbers."""
        return WorkgroupTile(self.tm, self.tn, self.unroll, self.matrix)

    def lacks(self, device: Capabilities) -> str:
        """What the tile of a workgroup needs and the device does not have, in words; "" when it fits."""
        if not self.whole_workgroup:
            return ""
        if self.matrix is not None and self.matrix not in device.matrices:
            precision, *shape = self.matrix
            return f"needs cooperative matrices of {precision}, {' x '.join(map(str, shape))}, which the device lacks"
        tile = self.workgroup_tile
        if tile.invocations > device.invocations:
            return f"needs {tile.invocations} invocations a workgroup, the device allows {device.invocations}"
        shared = tile.shared_bytes(device.subgroup_size)
        if shared > device.shared_bytes:
            return f"needs {shared} bytes of shared memory, the device has {device.shared_bytes}"
        return ""

    def tile(self, subgroup_size: int) -> tuple[int, int]:
        """Rows and columns of C that one tile covers."""
        return self.tm, self.tn * (1 if self.whole_workgroup else subgroup_size)

    @cached_property
    def name(self) -> str:
        """As it is forced and logged, for example "shuffle_32x8u2"."""
        unroll = f"u{self.unroll}" if self.unroll > 1 else ""
        split = f"_split{self.split}" if self.split > 1 else ""
        rounded = f"_{self.precision}" if self.precision != "float32" else ""
        if self.matrix is not None and self.matrix[1:] != (16, 16, 16):
            rounded += "_of" + "x".join(map(str, self.matrix[1:]))
        rolled = "_rolled" if self.written and self.whole_workgroup else ""
        return f"{self.spread}_{self.tm}x{self.tn}{unroll}{split}{rounded}{rolled}"


class _Choice(NamedTuple):
    variant: Variant
    swapped: bool = False


class Choice(_Choice):
    """A variant, and whether its lanes lie along the rows of C instead of its columns."""

    @cached_property
    def name(self) -> str:
        """For example "shuffle_32x8u2" or "shuffle_16x8u2_swapped"."""
        return self.variant.name + "_swapped" * self.swapped

    @property
    def barred_as(self) -> str:
        """What is barred when its kernel is wrong."""
        return self.variant.name


class Product(NamedTuple):
    """Sizes of a product: batch x [m, k] x [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.batch * self.m * self.n * self.k


class Costs(NamedTuple):
    """Nanoseconds of one lane-wide step, measured with a loop of each: a model to rank variants by, not to predict."""

    load: float
    store: float
    spread: float
    multiply: float
    round: float  # of the loop over k


_COMPILE_PAYS = 2**22  # multiply-adds from which the largest tiles are worth half a second of compilation


def _shuffle_family(unroll: int) -> tuple[Variant, ...]:
    return (
        *(Variant("shuffle", tm, 8, unroll, least_work=_COMPILE_PAYS) for tm in (32, 40)),  # 40 for odd sizes
        *(Variant("shuffle", tm, tn, unroll) for tm, tn in ((16, 8), (12, 8), (8, 8), (16, 4), (8, 4), (4, 8), (8, 1))),
    )


_LAVAPIPE_OLD = _shuffle_family(2)
_LAVAPIPE = _shuffle_family(4)
_SWIFTSHADER = tuple(
    Variant("broadcast", tm, tn, written=True) for tm, tn in ((16, 8), (8, 8), (16, 4), (8, 4), (4, 4), (8, 1))
)
_SHARED = tuple(Variant("shared", *tile) for tile in ((128, 128, 8), (128, 64, 8), (64, 64, 16)))
_EMULATED = Variant("shared", 64, 64, 8)  # the tile that any device can hold
_MATRIX_TILES = ((128, 128, 32), (128, 64, 16), (64, 64, 16))
_GPU = (
    *_SHARED,
    *(
        Variant("broadcast", tm, tn, unroll, subgroups=4)
        for tm, tn, unroll in ((16, 4, 2), (8, 8, 2), (8, 4, 2), (4, 4, 4), (8, 1, 4), (4, 1, 4))
    ),
)
_GPU_SPLIT = tuple(
    Variant("broadcast", tm, tn, unroll, split=split)
    for split in (4, 2)
    for tm, tn, unroll in ((8, 4, 2), (4, 4, 4), (4, 1, 4))
)
_COSTS_LAVAPIPE_OLD = Costs(load=4.7, store=4.8, spread=0.11, multiply=0.25, round=20.0)
_COSTS_LAVAPIPE = Costs(load=2.2, store=2.1, spread=0.05, multiply=0.23, round=10.0)
_COSTS_SWIFTSHADER = Costs(load=4.1, store=2.9, spread=0.56, multiply=1.1, round=4.0)
# Of cooperative matrices over multiply-adds: llvmpipe's, measured with version 26.1; GPUs', not measured
_MATRIX_SPEED = {"llvmpipe": 0.5}
_MATRIX_SPEED_GPU = 8.0
_COSTS_GPU = Costs(load=4.0, store=4.0, spread=1.0, multiply=1.0, round=4.0)  # not measured: relative to a multiply-add


def variants(device: Capabilities, split: int = 1) -> tuple[Variant, ...]:
    """The family of a device for one accumulation order; the last is the base variant the others are checked by."""
    if split > 1:
        return tuple(v for v in _GPU_SPLIT if v.split == split)
    if device.driver == "llvmpipe":
        return _LAVAPIPE if device.driver_major >= 24 else _LAVAPIPE_OLD
    return _SWIFTSHADER if device.driver == "SwiftShader" else _GPU


def all_variants(subgroup_size: int) -> tuple[Variant, ...]:
    """Every variant a device with this subgroup size can ask for."""
    families: list[tuple[Variant, ...]] = [_GPU, tuple(v for v in _GPU_SPLIT if v.split == _split_for(subgroup_size))]
    if subgroup_size == 4:
        families += [_SWIFTSHADER, tuple(v._replace(written=True) for v in _SHARED)]
    if subgroup_size in (4, 8, 16):  # lavapipe goes by the CPU's vector width
        families += [_LAVAPIPE, _LAVAPIPE_OLD]
    return tuple(dict.fromkeys(variant for family in families for variant in family))


def rounded_variants(subgroup_size: int) -> tuple[Variant, ...]:
    """Every variant for operands of less than float32."""
    emulated = [_EMULATED._replace(precision=precision) for precision in PRECISIONS[1:]]
    if subgroup_size == 4:
        emulated += [variant._replace(written=True) for variant in emulated]
    if subgroup_size not in FRAGMENTS:
        return tuple(emulated)
    shapes = [MatrixShape(precision, *FRAGMENTS[subgroup_size]) for precision in PRECISIONS[1:]]
    return (*emulated, *(variant for shape in shapes for variant in _matrix_family(shape)))


def _matrix_family(shape: MatrixShape) -> list[Variant]:
    # llvmpipe, whose fragments are the small ones, runs a workgroup on one thread: no tile has more reuse than another
    tiles = _MATRIX_TILES if shape.m == 16 else _MATRIX_TILES[-1:]
    return [Variant("matrix", *tile, precision=shape.precision, matrix=shape) for tile in tiles]


def rounded_choices(device: Capabilities, precision: str, product: Product) -> list[Choice]:
    """Variants for operands of less than float32, least estimate first: cooperative matrices where a GPU has them."""
    family = [v for shape in device.matrices if shape.precision == precision for v in _matrix_family(shape)]
    family.append(_EMULATED._replace(precision=precision, written=device.driver == "SwiftShader"))
    choices = [Choice(variant) for variant in family if not variant.lacks(device)]
    return sorted(choices, key=lambda choice: estimate(device, product, choice))


def _split_for(subgroup_size: int) -> int:
    return min(4, _MIN_INVOCATIONS // subgroup_size)


def split_of(device: Capabilities, product: Product) -> int:
    """Parts of k in the accumulation order of a product: more than 1 on GPUs where C alone would not fill the device.

    A CPU driver runs a workgroup on one thread: there it is always 1.
    """
    if device.is_cpu:
        return 1
    small = product.batch * product.m * product.n <= 16 * device.subgroup_size * device.parallel
    return _split_for(device.subgroup_size) if small and product.k >= 256 else 1


def candidates(device: Capabilities, product: Product) -> list[Choice]:
    """All that may carry out a product here, every one with the same bits."""
    work = product.work
    return [c for c in _candidates(device, split_of(device, product)) if c.variant.least_work <= work]


@lru_cache(maxsize=64)
def _candidates(device: Capabilities, split: int) -> tuple[Choice, ...]:
    """Of products of any size."""
    family = [v for v in variants(device, split) if not v.lacks(device)]
    # On a GPU neighbouring lanes should load neighbouring columns.
    return tuple(Choice(v, swapped) for v in family for swapped in ((False, True) if device.is_cpu else (False,)))


def tiles_of(device: Capabilities, product: Product, choice: Choice) -> tuple[int, int]:
    """Tiles along the spread side (rows, unless swapped) and along the lanes' side of C."""
    rows, columns = (product.n, product.m) if choice.swapped else (product.m, product.n)
    tall, wide = choice.variant.tile(device.subgroup_size)
    return -(-rows // tall), -(-columns // wide)


class _Figures(NamedTuple):
    """What the model has of a variant on a device: the time of a tile is (step k / split + store) a wave of tiles.

    rows, columns: of C in a tile. share: subgroups that a tile takes. step_of_pairs: where operands are read two
    elements at a time however they lie (ops/matmul_launch.py), as they are when k is a multiple of `unroll`; 0: never.
    """

    rows: int
    columns: int
    share: int
    step: float
    step_of_pairs: float
    split: int
    store: float
    unroll: int


@lru_cache(maxsize=4096)
def _figures(device: Capabilities, variant: Variant) -> _Figures:
    costs = _COSTS_GPU
    if device.driver == "llvmpipe":
        costs = _COSTS_LAVAPIPE if device.driver_major >= 24 else _COSTS_LAVAPIPE_OLD
    elif device.driver == "SwiftShader":
        costs = _COSTS_SWIFTSHADER
    size, tile = device.subgroup_size, variant.tile(device.subgroup_size)
    if variant.whole_workgroup:
        workgroup = variant.workgroup_tile
        shared, loaded = workgroup.cost(size)
        faster = _MATRIX_SPEED.get(device.driver, _MATRIX_SPEED_GPU) if variant.matrix is not None else 1.0
        multiply = costs.multiply / faster
        step = workgroup.sums * multiply + shared * costs.spread + loaded * costs.load + costs.round / variant.unroll
        store = workgroup.sums * costs.store
        return _Figures(*tile, workgroup.invocations // size, step, 0.0, 1, store, variant.unroll)
    slots = -(-variant.tm // size)
    sums = variant.tm * variant.tn

    def step_of(load: float) -> float:
        step = (variant.tn + slots) * load + variant.tm * costs.spread + costs.round / variant.unroll
        return step + sums * costs.multiply

    pairs = device.driver == "llvmpipe" and size == 8
    pairs &= variant.unroll % 2 == 0 and slots % 2 == 0 and variant.tn % 2 == 0
    step_of_pairs = step_of(costs.load * 0.55) if pairs else 0.0
    split = variant.split
    return _Figures(*tile, split, step_of(costs.load), step_of_pairs, split, sums * costs.store, variant.unroll)


def estimate(device: Capabilities, product: Product, choice: Choice) -> float:
    """Nanoseconds by the model: tiles are worked through `parallel` at a time, padding counts in full."""
    tall, wide, share, step, step_of_pairs, split, store, unroll = _figures(device, choice.variant)
    batch, m, n, k = product
    if step_of_pairs and not (m % 2 or n % 2 or k % unroll):
        step = step_of_pairs
    rows, columns = (n, m) if choice.swapped else (m, n)
    waves = -(-batch * -(-rows // tall) * -(-columns // wide) * share // device.parallel)
    return waves * (step * k / split + store)


def least_estimate(device: Capabilities, product: Product, choices: Sequence[Choice] | None = None) -> Choice:
    """Of these choices, or of all candidates, the one with the least estimated time.

    Of equals it is the first, which is the larger tile.
    """
    return min(
        candidates(device, product) if choices is None else choices,
        key=lambda choice: estimate(device, product, choice),
    )
