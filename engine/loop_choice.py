"""Which variant of a kernel by hand that loops a call takes on a device (engine/variant_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .capabilities import Capabilities
from .errors import BadInputError
from .loop_variants import LoopVariant, LoopWork, estimated, loop_variants, variant_names
from .variant_cache import TuningTable
from .variant_choice import Selection, VariantChooser, hash_of_files, select, uses_tuning


def family_of(work: LoopWork) -> tuple[LoopVariant, ...]:
    """A call's variants; the last is the base variant."""
    return loop_variants(work.kernel, work.factors, work.turns)


def select_for(device: Capabilities, work: LoopWork, table: TuningTable, tuned: bool = True) -> Selection[LoopVariant]:
    """`select` among a call's variants."""

    def unmeasured(usable: Sequence[LoopVariant]) -> Selection[LoopVariant]:
        return Selection(*estimated(device, work, usable))

    return select(work.key, family_of(work), unmeasured, table, tuned)


@cache
def _kernel_hash() -> str:
    sums = ("sum.comp", "column_partials.comp", "square_sums.comp", "square_sums_many.comp", "squares.glsl")
    updates = ("update_many.comp", "adamw.glsl", "sgd.glsl", "tensor_table.glsl", "ops/tensor_table.py")
    adafactor = ("adafactor_rows.comp", "adafactor_update.comp", "adafactor_vector.comp")
    others = ("attention_sinks.comp", "exp.glsl", "embedding_links.comp", "embedding_backward.comp")
    shared = ("rows.glsl", "words.glsl", "turns.glsl", "ops/loop_kernels.py", "loop_variants.py")
    return hash_of_files((*sums, *updates, *adafactor, *others, *shared))


class LoopChooser(VariantChooser[LoopVariant]):
    """Chooses for kernels by hand that loop. plans: kernel, pieces a workgroup and turns, by call."""

    family = "loop"
    ops = ("loop",)

    @classmethod
    def kernel_hash(cls) -> str:
        return _kernel_hash()

    def choose(self, work: LoopWork) -> LoopVariant:
        """The variant for a call. A forced one is taken as far as the kernel and the device have it.

        Raises BadInputError for a forced one that there is not at all, VkfoldError for a barred one.
        """
        name = self.forced()
        if not name:
            return self.note(work.key, select_for(self.device, work, self.table, uses_tuning()))
        self.check_name("loop", name)
        factor, turns = map(int, name.split("x"))
        choice = LoopVariant(work.kernel, min(factor, work.factors[0]), min(turns, work.turns[0]))
        return self.note(work.key, self.forced_choice(choice))

    def check_name(self, op: str, name: str) -> None:
        if name not in variant_names():
            raise BadInputError(
                f"no {op} variant {name!r}: there are {', '.join(variant_names())} (workgroups of so many usual ones x "
                "rounds of a loop at a time)"
            )
