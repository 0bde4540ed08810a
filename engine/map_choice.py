"""Which variant of a map kernel a call takes on a device (engine/variant_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .capabilities import Capabilities
from .errors import BadInputError
from .map_variants import SIZES, STEPS, MapVariant, estimated, map_variants
from .variant_cache import TuningTable
from .variant_choice import Selection, VariantChooser, hash_of_files, select, uses_tuning


def tuning_key(kernel: str, num_elements: int) -> str:
    """How a call is called in a table."""
    return f"map {kernel} {num_elements}"


def select_for(
    device: Capabilities,
    kernel: str,
    num_elements: int,
    width: int,
    largest: int,
    table: TuningTable,
    tuned: bool = True,
) -> Selection[MapVariant]:
    """`select` among a kernel's variants. width: elements a piece; largest: invocations a workgroup allowed."""

    def unmeasured(usable: Sequence[MapVariant]) -> Selection[MapVariant]:
        return Selection(*estimated(device, -(-num_elements // width), usable))

    return select(tuning_key(kernel, num_elements), map_variants(kernel, largest), unmeasured, table, tuned)


@cache
def _kernel_hash() -> str:
    shared = ("exp.glsl", "expr.glsl", "float_bits.glsl", "philox.glsl", "random.glsl", "words.glsl")
    by_hand = ("pieces.glsl", "rows.glsl", "embedding.comp", "rope.comp", "cast.comp", "adamw.comp", "sgd.comp")
    updates = ("adamw.glsl", "sgd.glsl", "ops/piece_kernels.py")
    return hash_of_files((*shared, *by_hand, *updates, "map_kernel.py", "map_variants.py"))


class MapChooser(VariantChooser[MapVariant]):
    """Chooses for map kernels. plans: kernel and number of workgroups, by call."""

    family = "map"
    ops = ("map",)

    @classmethod
    def kernel_hash(cls) -> str:
        return _kernel_hash()

    def choose(self, kernel: str, num_elements: int, width: int, largest: int) -> MapVariant:
        """The variant for a call.

        Raises BadInputError for a forced one that there is not, VkfoldError for a barred one.
        """
        key, name = tuning_key(kernel, num_elements), self.forced()
        if name:
            self.check_name("map", name)
            size, steps = map(int, name.split("x"))
            if size > largest:
                raise BadInputError(f"map variant {name}: this device allows {largest} invocations a workgroup")
            return self.note(key, self.forced_choice(MapVariant(kernel, size, steps)))
        selection = select_for(self.device, kernel, num_elements, width, largest, self.table, uses_tuning())
        return self.note(key, selection)

    def check_name(self, op: str, name: str) -> None:
        names = [f"{size}x{steps}" for size in SIZES for steps in STEPS]
        if name not in names:
            raise BadInputError(
                f"no {op} variant {name!r}: there are {', '.join(names)} (invocations a workgroup x pieces each)"
            )
