"""Which variant a fold over rows takes on a device (engine/variant_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from .capabilities import Capabilities
from .errors import BadInputError
from .fold import FoldSpec
from .fold_variants import RowVariant, estimated, row_variants, variant_names
from .variant_cache import TuningTable
from .variant_choice import Selection, VariantChooser, hash_of_files, select, uses_tuning


class RowCall(NamedTuple):
    """What the choice looks at. kernel: its name. largest: invocations a workgroup that the device allows; compiles:
    whether kernels can be compiled now, which those that keep rows are."""

    spec: FoldSpec
    kernel: str
    rows: int
    cols: int
    largest: int
    compiles: bool = True

    @property
    def key(self) -> str:
        """Its name in a table."""
        return f"row_fold {self.kernel} {self.rows}x{self.cols}"


def family_of(device: Capabilities, call: RowCall) -> tuple[RowVariant, ...]:
    """A call's variants; the last is the base variant."""
    family = row_variants(device, call.kernel, call.cols, call.largest)
    return tuple(choice for choice in family if call.compiles or not choice.rounds)


def select_for(device: Capabilities, call: RowCall, table: TuningTable, tuned: bool = True) -> Selection[RowVariant]:
    """`select` among a call's variants."""

    def unmeasured(usable: Sequence[RowVariant]) -> Selection[RowVariant]:
        return Selection(*estimated(device, call.spec, call.rows, call.cols, usable))

    return select(call.key, family_of(device, call), unmeasured, table, tuned)


@cache
def _kernel_hash() -> str:
    makers = ("fold.py", "fold_glsl.py", "fold_variants.py", "ops/row_fold.py", "ops/row_kernels.py")
    return hash_of_files(("rows.glsl", "words.glsl", "exp.glsl", "expr.glsl", "float_bits.glsl", *makers))


class RowFoldChooser(VariantChooser[RowVariant]):
    """Chooses for folds over rows. plans: kernel, workgroups and sizes, by call."""

    family = "row_fold"
    ops = ("row_fold",)

    @classmethod
    def kernel_hash(cls) -> str:
        return _kernel_hash()

    def choose(self, call: RowCall) -> RowVariant:
        """The variant for a call.

        Raises BadInputError for a forced one that there is not, VkfoldError for a barred one.
        """
        name = self.forced()
        if not name:
            return self.note(call.key, select_for(self.device, call, self.table, uses_tuning()))
        self.check_name("row_fold", name)
        family = family_of(self.device, call)
        found = [choice for choice in family if choice.name == name]
        if not found:
            names = ", ".join(choice.name for choice in family)
            raise BadInputError(f"row_fold variant {name}: rows of {call.cols} have {names} on this device")
        return self.note(call.key, self.forced_choice(found[0]))

    def check_name(self, op: str, name: str) -> None:
        if name not in variant_names():
            raise BadInputError(f"no {op} variant {name!r}: there are {', '.join(variant_names())} (rows a workgroup)")
