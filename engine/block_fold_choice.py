"""Which variant a call of a block fold takes on a device (engine/variant_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .block_fold_call import BlockCall
from .block_fold_variants import ROWS, TileVariant, device_tile, estimated_rows, tile_variants
from .capabilities import Capabilities
from .errors import BadInputError
from .variant_cache import TuningTable
from .variant_choice import OPS_WITH_VARIANTS, Selection, VariantChooser, hash_of_files, op_of_fold, select, uses_tuning


def family_of(device: Capabilities, call: BlockCall) -> tuple[TileVariant, ...]:
    """A call's variants, widest first; the last is the base variant."""
    fold = call.fold
    return tile_variants(device, fold.name, call.sizes.head_dim, call.suffix, fold.rows_in_registers)


def select_for(device: Capabilities, call: BlockCall, table: TuningTable, tuned: bool = True) -> Selection[TileVariant]:
    """`select` among a call's variants; where nothing was measured the widest that is no wider than the estimate."""
    sizes = call.sizes

    def unmeasured(usable: Sequence[TileVariant]) -> Selection[TileVariant]:
        rows, why = estimated_rows(device, sizes.head_dim, sizes.num_held, call.fold.rows_in_registers)
        return Selection(next((v for v in usable if v.tile.rows <= rows), usable[-1]), why)

    return select(call.key, family_of(device, call), unmeasured, table, tuned)


@cache
def _kernel_hash() -> str:
    shaders = ("block_fold.glsl", "attention_masks.glsl", "see_all.glsl", "exp.glsl", "expr.glsl")
    folds = ("attention_folds.py", "attention_masks.py", "attention_scores.py", "block_fold.py", "fold.py")
    makers = (
        "block_fold_glsl.py",
        "fold_glsl.py",
        "register_loops.py",
        "block_fold_variants.py",
        "ops/block_fold_dispatch.py",
    )
    return hash_of_files((*shaders, *folds, *makers))


class BlockFoldChooser(VariantChooser[TileVariant]):
    """Chooses for block folds. plans: tiles by call."""

    family = "block_fold"
    ops = (*OPS_WITH_VARIANTS["attention"], "block_fold")

    @classmethod
    def kernel_hash(cls) -> str:
        return _kernel_hash()

    def choose(self, call: BlockCall) -> TileVariant:
        """The variant for a call.

        Raises BadInputError for a forced one that there is not, VkfoldError for a barred one.
        """
        op = op_of_fold(call.fold.name)
        name = self.forced(op)
        if name:
            self.check_name(op, name)
            tile = device_tile(self.device, int(name.removeprefix("rows")))
            choice = TileVariant(call.fold.name, call.sizes.head_dim, tile, call.suffix)
            return self.note(call.key, self.forced_choice(choice))
        return self.note(call.key, select_for(self.device, call, self.table, uses_tuning()))

    def check_name(self, op: str, name: str) -> None:
        names = [f"rows{rows}" for rows in ROWS]
        if name not in names:
            raise BadInputError(f"no {op} variant {name!r}: there are {', '.join(names)} (rows a lane)")
