"""The choice of a kernel variant: forced, else measured, else estimated; and the log line that says why.

`select` is the pure function: op, shape, device capabilities and the device's table of measurements decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from . import switches
from .errors import BadInputError, VkfoldError
from .kernel import SHADER_DIR
from .matmul_variants import (
    Capabilities,
    Choice,
    Product,
    all_variants,
    candidates,
    estimate,
    least_estimate,
    rounded_choices,
    variants,
)
from .variant_cache import TuningTable

if TYPE_CHECKING:
    from .recorder import Recorder

_forced: list[str] = []


@contextmanager
def forced_variant(name: str) -> Iterator[None]:
    """Every matmul launched inside uses the variant of this name. For tests and measurements.

    The engine may launch an op some calls late: end the batch or download results inside.
    """
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


OPS_WITH_VARIANTS = ("matmul",)


def forced_by_switch(op: str, text: str) -> str:
    """The variant VKFOLD_VARIANT names for an op ("op=variant", several with commas), "" for none.

    Raises BadInputError for a part without "=", or an op that has no variants.
    """
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, variant = part.partition("=")
        if not equals:
            raise BadInputError(f"VKFOLD_VARIANT={text}: {part!r} has no '='; write op=variant, for example matmul=...")
        if name.strip() not in OPS_WITH_VARIANTS:
            known = ", ".join(OPS_WITH_VARIANTS)
            raise BadInputError(f"VKFOLD_VARIANT={text}: {name.strip()!r} has no variants; these ops have: {known}")
        if name.strip() == op:
            return variant.strip()
    return ""


def tuning_key(product: Product, layout: str) -> str:
    """How a product is called in a table. layout: NN, NT, TN or TT."""
    return f"matmul {'x'.join(map(str, product))} {layout}"


class Selection(NamedTuple):
    """A choice, and why it was made."""

    choice: Choice
    why: str


def select(device: Capabilities, product: Product, key: str, table: TuningTable, tuned: bool = True) -> Selection:
    """The fastest measured candidate that is not barred, else (nothing measured, or tuned False) the least estimate.

    Raises VkfoldError when every candidate is barred.
    """
    usable = [choice for choice in candidates(device, product) if choice.variant.name not in table.barred]
    if not usable:
        raise VkfoldError(
            f"every variant of matmul for {'x'.join(map(str, product))} is barred on this device: "
            + "; ".join(f"{name}: {reason}" for name, reason in table.barred.items())
        )
    seconds = table.times.get(key, {}) if tuned else {}
    measured = [choice for choice in usable if choice.name in seconds]
    if measured:
        best = min(measured, key=lambda choice: seconds[choice.name])
        return Selection(best, f"measured {1e3 * seconds[best.name]:.3g} ms, the least of {len(measured)}")
    best = least_estimate(device, product, usable)
    return Selection(best, f"least estimate of {len(usable)}, {estimate(device, product, best) / 1e6:.3g} ms")


@cache
def _kernel_hash() -> str:
    """Of the files that make the kernels of matmul: what was measured or checked with others does not count."""
    here = Path(__file__).parent
    shaders = ("matmul.comp", "matmul_shared.comp", "float_bits.glsl", "exp.glsl", "expr.glsl")
    makers = ("matmul_variants", "ops/matmul_launch", "ops/matmul_parts", "ops/activation")
    printers = ("expr_glsl", "expr_walk", "expr_simplify", "kernel", "spirv", "glsl_compiler")
    files = [*(SHADER_DIR / name for name in shaders), *(here / f"{name}.py" for name in (*makers, *printers))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


class MatmulChooser:
    """Chooses for one recorder. plans: what was worked out, by shape; table: what is known of the device's variants."""

    _all: ClassVar[WeakKeyDictionary[Any, MatmulChooser]] = WeakKeyDictionary()

    def __init__(self, device: Capabilities, table: TuningTable) -> None:
        self.device = device
        self.table = table
        self.plans: dict[Any, Any] = {}
        self.reasons: dict[str, str] = {}  # variant -> why it was last chosen
        self._switch = ""  # VKFOLD_VARIANT as last read, and what it means
        self._switched = ""

    @classmethod
    def of(cls, gpu: Recorder) -> MatmulChooser:
        """The chooser of a recorder."""
        found = cls._all.get(gpu)
        if found is None:
            table = TuningTable.of_device(gpu.device.physical, _kernel_hash())
            found = cls._all[gpu] = cls(Capabilities.of(gpu), table)
        return found

    def forced(self) -> str:
        """Name of the forced variant, "" for none."""
        if _forced:
            return _forced[-1]
        text = switches.raw("VKFOLD_VARIANT")
        if text != self._switch:
            self._switch, self._switched = text, forced_by_switch("matmul", text)
        return self._switched

    def check_forced(self) -> None:
        """Raises BadInputError when VKFOLD_VARIANT names a variant that this device does not have."""
        if name := self.forced():
            self.named(name)

    def choose(self, product: Product, layout: str = "NN", precision: str = "float32") -> Choice:
        """The variant for a product.

        Raises BadInputError for a forced one that there is not, VkfoldError for a barred one.
        """
        name = self.forced() if precision == "float32" else ""
        if precision != "float32":
            usable = [c for c in rounded_choices(self.device, precision) if c.variant.name not in self.table.barred]
            if not usable:
                raise VkfoldError(f"matmul in {precision} is barred on this device: {self.table.barred}")
            choice, why = usable[0], f"{precision} was asked for"
        elif name:
            choice, why = self.named(name), "forced"
            if choice.variant.name in self.table.barred:
                raise VkfoldError(
                    f"matmul variant {name} is forced and barred: {self.table.barred[choice.variant.name]}"
                )
        else:
            tuned = switches.get("VKFOLD_TUNE")
            choice, why = select(self.device, product, tuning_key(product, layout), self.table, tuned)
        self.reasons[choice.name] = why
        switches.logger.info("%s: %s (%s)", tuning_key(product, layout), choice.name, why)
        return choice

    def bar(self, variant: str, reason: str) -> None:
        """Never use a variant again on this device: in this process and, by the table, in later ones."""
        self.table.bar(variant, reason)
        self.plans.clear()
        switches.logger.warning("matmul variant %s is barred on this device: %s", variant, reason)

    def named(self, name: str) -> Choice:
        """The choice with this name. Raises BadInputError, listing what there is, for one that does not exist."""
        family = dict.fromkeys((*variants(self.device), *all_variants(self.device.subgroup_size)))
        choices = {c.name: c for v in family for c in (Choice(v), Choice(v, True))}
        if name not in choices:
            raise BadInputError(f"no matmul variant {name!r}: this device has {', '.join(v.name for v in family)}")
        return choices[name]
