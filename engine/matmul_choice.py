"""Which variant of matmul a product takes on a device (engine/variant_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .capabilities import Capabilities
from .errors import BadInputError, VkfoldError
from .matmul_variants import (
    Choice,
    Product,
    all_variants,
    candidates,
    estimate,
    least_estimate,
    rounded_choices,
    rounded_variants,
    variants,
)
from .variant_cache import TuningTable
from .variant_choice import Selection, VariantChooser, hash_of_files, select, uses_tuning


def tuning_key(product: Product, layout: str) -> str:
    """How a product is called in a table. layout: NN, NT, TN or TT."""
    return f"matmul {'x'.join(map(str, product))} {layout}"


def call_name(product: Product, layout: str, precision: str) -> str:
    """How a product is called in a log or a profile: in float32 as in a table."""
    return " ".join([tuning_key(product, layout), *[precision] * (precision != "float32")])


def select_for(
    device: Capabilities, product: Product, key: str, table: TuningTable, tuned: bool = True
) -> Selection[Choice]:
    """`select` among a product's candidates; the least estimate where nothing was measured."""

    def unmeasured(usable: Sequence[Choice]) -> Selection[Choice]:
        best = least_estimate(device, product, usable)
        return Selection(best, f"least estimate of {len(usable)}, {estimate(device, product, best) / 1e6:.3g} ms")

    return select(key, candidates(device, product), unmeasured, table, tuned)


@cache
def _kernel_hash() -> str:
    shaders = ("matmul.comp", "matmul_shared.comp", "float_bits.glsl", "exp.glsl", "expr.glsl")
    makers = (
        "matmul_variants.py",
        "workgroup_tile.py",
        "ops/matmul_launch.py",
        "ops/matmul_parts.py",
        "ops/activation.py",
    )
    return hash_of_files((*shaders, *makers))


class MatmulChooser(VariantChooser[Choice]):
    """Chooses for matmul. plans: dispatches by layout."""

    family = "matmul"
    ops = ("matmul",)

    @classmethod
    def kernel_hash(cls) -> str:
        return _kernel_hash()

    def choose(self, product: Product, layout: str = "NN", precision: str = "float32") -> Choice:
        """The variant for a product; one that is forced is for products of its own precision.

        Raises BadInputError for a forced one that there is not, VkfoldError for a barred one.
        """
        call, name = call_name(product, layout, precision), self.forced()
        forced = self.named(name) if name else None
        if forced is not None and forced.variant.precision == precision:
            return self.note(call, self.forced_choice(forced))
        if precision != "float32":
            choices = rounded_choices(self.device, precision, product)
            usable = [choice for choice in choices if choice.barred_as not in self.table.barred]
            if not usable:
                raise VkfoldError(f"matmul in {precision} is barred on this device: {self.table.barred}")
            return self.note(call, Selection(usable[0], f"{precision} was asked for"))
        return self.note(call, select_for(self.device, product, call, self.table, uses_tuning()))

    def check_name(self, op: str, name: str) -> None:
        self.named(name)

    def named(self, name: str) -> Choice:
        """The choice with this name.

        Raises BadInputError, listing what there is, for one that does not exist; and for one that cannot run here.
        """
        size = self.device.subgroup_size
        family = dict.fromkeys((*variants(self.device), *all_variants(size), *rounded_variants(size)))
        choices = {c.name: c for v in family for c in (Choice(v), Choice(v, True))}
        if name not in choices:
            raise BadInputError(f"no matmul variant {name!r}: this device has {', '.join(v.name for v in family)}")
        lacks = choices[name].variant.lacks(self.device)
        if lacks:
            raise BadInputError(f"matmul variant {name!r} {lacks}: force another")
        return choices[name]
