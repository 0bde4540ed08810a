"""The choice of a kernel variant: forced, else measured, else estimated; and the log line that says why.

`select` is the pure function. What a family has for a shape and device, and what is taken of it where nothing was
measured, is in a file `..._variants.py` for each (matmul, block_fold, fold, map), its chooser in `..._choice.py`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from . import switches
from .capabilities import Capabilities
from .errors import BadInputError, VkfoldError
from .kernel import SHADER_DIR, Kernel
from .variant_cache import TuningTable

if TYPE_CHECKING:
    from .recorder import Recorder


class AnyVariant(Protocol):
    """What the choice knows of a variant. name: as it is forced, measured and logged; barred_as: as it is barred."""

    @property
    def name(self) -> str: ...

    @property
    def barred_as(self) -> str: ...


V = TypeVar("V", bound=AnyVariant)


@dataclass(frozen=True)
class Selection(Generic[V]):
    """A choice, and why it was made."""

    choice: V
    why: str


def select(
    key: str,
    candidates: Sequence[V],
    unmeasured: Callable[[Sequence[V]], Selection[V]],
    table: TuningTable,
    tuned: bool = True,
) -> Selection[V]:
    """The fastest candidate measured under `key` that is not barred, else (none was, or tuned False) `unmeasured` of
    those that are not barred.

    Raises VkfoldError when every candidate is barred.
    """
    usable = [choice for choice in candidates if choice.barred_as not in table.barred]
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in table.barred.items())
        raise VkfoldError(f"every variant of {key} is barred on this device: {reasons}")
    seconds = table.times.get(key) if tuned else None
    measured = [choice for choice in usable if choice.name in seconds] if seconds else []
    if seconds and measured:
        best = min(measured, key=lambda choice: seconds[choice.name])
        return Selection(best, f"measured {1e3 * seconds[best.name]:.3g} ms, the least of {len(measured)}")
    return unmeasured(usable)


# -- forcing -----------------------------------------------------------------------------------------------------------
# what VKFOLD_VARIANT may name -> the ops whose variants that forces
OPS_WITH_VARIANTS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention_forward", "attention_d_q", "attention_d_kv"),
    "attention_forward": ("attention_forward",),
    "attention_d_q": ("attention_d_q",),
    "attention_d_kv": ("attention_d_kv",),
    "block_fold": ("block_fold",),  # any but attention's
    "map": ("map",),  # every elementwise kernel
    "row_fold": ("row_fold",),  # norms, softmax, cross-entropy, engine.fold
    "loop": ("loop",),  # sums, updates of many tensors, Adafactor
}
_forced: list[tuple[str, str]] = []


def op_of_fold(name: str) -> str:
    """What VKFOLD_VARIANT calls a fold over blocks: attention's by their names, all others by one."""
    return name if name in OPS_WITH_VARIANTS else "block_fold"


@contextmanager
def forced_variant(name: str, op: str = "matmul") -> Iterator[None]:
    """Every call of the op (a key of OPS_WITH_VARIANTS) inside uses this variant. For tests and measurements."""
    _forced.extend((one, name) for one in OPS_WITH_VARIANTS[op])
    try:
        yield
    finally:
        del _forced[-len(OPS_WITH_VARIANTS[op]) :]


@cache
def forced_by_switch(text: str) -> Mapping[str, str]:
    """op -> variant, from the text of VKFOLD_VARIANT ("op=variant", several with commas; of two the later counts).

    Raises BadInputError for a part without "=", or an op that has no variants.
    """
    forced: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, variant = (word.strip() for word in part.partition("="))
        if not equals:
            raise BadInputError(f"VKFOLD_VARIANT={text}: {part!r} has no '='; write op=variant, for example matmul=...")
        if name not in OPS_WITH_VARIANTS:
            known = ", ".join(OPS_WITH_VARIANTS)
            raise BadInputError(f"VKFOLD_VARIANT={text}: {name!r} has no variants; these ops have: {known}")
        forced |= dict.fromkeys(OPS_WITH_VARIANTS[name], variant)
    return forced


# -- choosing ----------------------------------------------------------------------------------------------------------
C = TypeVar("C", bound="VariantChooser[Any]")
_MOST_PLANS = 8192


class VariantChooser(Generic[V]):
    """Chooses the variants of a family of kernels for one recorder; a subclass for each family.

    plans: what was worked out, by shape. table: what is known of the device's variants. reasons: name of a kernel that
    is in a plan -> call (a key of the table) -> its variant and why it was chosen.
    """

    family: ClassVar[str]  # as the table is called
    ops: ClassVar[tuple[str, ...]]  # that are forced apart
    num_asked: ClassVar[int] = 0  # times that a choice was asked for, of any family: tells which calls choose
    num_barred: ClassVar[int] = 0  # variants barred by this process, of any family

    def __init__(self, device: Capabilities, table: TuningTable) -> None:
        self.device = device
        self.table = table
        self.plans: dict[Hashable, Any] = {}
        self.reasons: dict[str, dict[str, str]] = {}
        self._chosen: dict[str, str] = {}  # call -> variant and why, as it was chosen the last time

    @classmethod
    def of(cls: type[C], gpu: Recorder) -> C:
        """The chooser of a recorder."""
        found: C | None = gpu.choosers.get(cls)
        if found is None:
            table = TuningTable.of_device(gpu.device.physical, cls.family, cls.kernel_hash())
            found = gpu.choosers[cls] = cls(Capabilities.of(gpu), table)
        return found

    @classmethod
    def kernel_hash(cls) -> str:
        """Of what makes the kernels: what was measured or checked with others does not count."""
        raise NotImplementedError

    def check_name(self, op: str, name: str) -> None:
        """Raises BadInputError, listing what there is, for the name of a variant that there is not here."""
        raise NotImplementedError

    def forced(self, op: str = "") -> str:
        """Name of the forced variant of an op, by default the family's first; "" for none."""
        VariantChooser.num_asked += 1
        op, state = op or self.ops[0], choice_state()
        for one, name in reversed(state.forced):
            if one == op:
                return name
        return forced_by_switch(state.variant).get(op, "")

    def check_forced(self) -> None:
        """Raises BadInputError when VKFOLD_VARIANT names a variant that this device does not have."""
        for op in self.ops:
            if name := self.forced(op):
                self.check_name(op, name)

    def forced_choice(self, choice: V) -> Selection[V]:
        """Of a choice that is forced. Raises VkfoldError when it is barred."""
        if choice.barred_as in self.table.barred:
            reason = self.table.barred[choice.barred_as]
            raise VkfoldError(f"{self.family} variant {choice.name} is forced and barred: {reason}")
        return Selection(choice, "forced")

    def note(self, call: str, selection: Selection[V]) -> V:
        """Log a choice, if it is new, and keep its reason for `keep`; returns it."""
        choice, reason = selection.choice, f"{selection.choice.name}, {selection.why}"
        if self._chosen.get(call) != reason:
            for calls in self.reasons.values():  # it may have run in other kernels: forced, measured or barred since
                calls.pop(call, None)
            if len(self._chosen) >= _MOST_PLANS:
                self._chosen.clear()
            self._chosen[call] = reason
            switches.logger.info("%s: %s (%s)", call, choice.name, selection.why)
        return choice

    def keep(self, key: Hashable, plan: Any, call: str = "", kernels: Iterable[Kernel] = ()) -> None:
        """Keep what was worked out; all is forgotten where shapes never end. call: whose choice was noted just before,
        and the kernels that it runs in; none where nothing was chosen."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
            self.reasons.clear()
        self.plans[key] = plan
        for kernel in kernels:
            self.reasons.setdefault(kernel.name, {})[call] = self._chosen[call]

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Inside, no plan and no reason is there: each call's are made again, and forgotten behind it."""
        kept, num_barred = (self.plans, self.reasons), VariantChooser.num_barred
        self.plans, self.reasons = {}, {}
        try:
            yield
        finally:
            self.plans, self.reasons = kept
            if VariantChooser.num_barred != num_barred:
                self.plans.clear()
                self.reasons.clear()

    def bar(self, variant: str, reason: str) -> None:
        """Never use a variant again on this device: in this process and, by the table, in later ones."""
        self.table.bar(variant, reason)
        VariantChooser.num_barred += 1
        self.plans.clear()
        switches.logger.warning("%s variant %s is barred on this device: %s", self.family, variant, reason)


# -- what choices depend on --------------------------------------------------------------------------------------------
class ChoiceState(NamedTuple):
    """What choices depend on that may change while a program runs: while it is equal, no choice changes.

    variant, tune: texts of VKFOLD_VARIANT and VKFOLD_TUNE. forced: by `forced_variant`. num_barred: of all families.
    """

    variant: str
    tune: str
    forced: tuple[tuple[str, str], ...]
    num_barred: int


class _OfCall(threading.local):
    """state: of the call that is being launched, some calls after it was made; None: as things stand."""

    state: ChoiceState | None = None


_of_call = _OfCall()
_now = ChoiceState("", "", (), 0)  # as things stood the last time: one object while nothing changes


def choice_state() -> ChoiceState:
    """What choices depend on now, or inside `ChoosingAs` did then."""
    state = _of_call.state
    if state is not None:
        return state
    global _now
    now = switches.raw("VKFOLD_VARIANT"), switches.raw("VKFOLD_TUNE"), tuple(_forced), VariantChooser.num_barred
    if now != _now:
        _now = ChoiceState(*now)
    return _now


def ask_state() -> ChoiceState:
    """The same, for a launch that looks for what it chose before: whoever watches sees that it chooses."""
    VariantChooser.num_asked += 1
    return choice_state()


class ChoosingAs:
    """Inside, variants are chosen as they were when `choice_state` gave this: what a call chooses does not depend on
    when it is launched. Barred variants stay barred. None: as things stand."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: ChoiceState | None) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before, _of_call.state = _of_call.state, self._state

    def __exit__(self, *exc: object) -> None:
        _of_call.state = self._before


def uses_tuning() -> bool:
    """VKFOLD_TUNE: whether what was measured counts. Raises BadInputError for a text that says neither."""
    return bool(switches.get("VKFOLD_TUNE", {"VKFOLD_TUNE": choice_state().tune}))


def hash_of_files(names: Sequence[str]) -> str:
    """Of shaders ("matmul.comp") and modules of engine/ ("ops/matmul_launch.py"), and of all that prints and compiles
    kernels."""
    printers = ("expr_glsl.py", "expr_walk.py", "expr_simplify.py", "kernel.py", "kernel_arguments.py")
    here = Path(__file__).parent
    folders = {True: here, False: SHADER_DIR}
    files = [folders[name.endswith(".py")] / name for name in (*names, *printers, "spirv.py", "glsl_compiler.py")]
    return hashlib.sha256(b"".join(map(_hash_of_file, files))).hexdigest()[:12]


@cache
def _hash_of_file(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
