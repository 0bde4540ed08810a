"""The choice of a kernel variant: forced, else measured, else estimated; and the log line that says why.

A choice is a pure function of op, shape, device capabilities and the device's table of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from . import switches
from .errors import BadInputError
from .matmul_variants import (
    Capabilities,
    Choice,
    Product,
    all_variants,
    candidates,
    estimate,
    least_estimate,
    variants,
)

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


def forced_by_switch(op: str, text: str) -> str:
    """The variant VKFOLD_VARIANT names for an op ("op=variant", several with commas), "" for none.

    Raises BadInputError for a part without "=".
    """
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, variant = part.partition("=")
        if not equals:
            raise BadInputError(f"VKFOLD_VARIANT={text}: {part!r} has no '='; write op=variant, for example matmul=...")
        if name.strip() == op:
            return variant.strip()
    return ""


class MatmulChooser:
    """Chooses for one recorder. plans: dispatches kept by shape."""

    _all: ClassVar[WeakKeyDictionary[Any, MatmulChooser]] = WeakKeyDictionary()

    def __init__(self, device: Capabilities) -> None:
        self.device = device
        self.plans: dict[Any, Any] = {}
        self._switch = ""  # VKFOLD_VARIANT as last read, and what it means
        self._switched = ""

    @classmethod
    def of(cls, gpu: Recorder) -> MatmulChooser:
        """The chooser of a recorder."""
        found = cls._all.get(gpu)
        if found is None:
            found = cls._all[gpu] = cls(Capabilities.of(gpu))
        return found

    def forced(self) -> str:
        """Name of the forced variant, "" for none."""
        if _forced:
            return _forced[-1]
        text = switches.raw("VKFOLD_VARIANT")
        if text != self._switch:
            self._switch, self._switched = text, forced_by_switch("matmul", text)
        return self._switched

    def choose(self, product: Product) -> Choice:
        """The variant for a product. Raises ValueError when a forced one does not exist."""
        name = self.forced()
        if name:
            choice, why = self.named(name), "forced"
        else:
            choice = least_estimate(self.device, product)
            why = f"least estimate of {len(candidates(self.device, product))}"
            why += f", {estimate(self.device, product, choice) / 1e6:.3g} ms"
        switches.logger.debug("matmul %s: %s (%s)", "x".join(map(str, product)), choice.name, why)
        return choice

    def named(self, name: str) -> Choice:
        """The choice with this name. Raises ValueError, listing what there is, for one that does not exist."""
        family = dict.fromkeys((*variants(self.device), *all_variants(self.device.subgroup_size)))
        choices = {c.name: c for v in family for c in (Choice(v), Choice(v, True))}
        if name not in choices:
            raise ValueError(f"no matmul variant {name!r}: this device has {', '.join(v.name for v in family)}")
        return choices[name]
