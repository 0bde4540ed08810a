"""Fusion of neighbouring ops: a short window of recorded calls in which rules look for what one dispatch can do.

Ops are launched a few calls late. By then it is known whether anybody still holds what they made, so a rule can leave
out writing it. A rule (fusion_rules.py) replaces two calls by one that moves fewer bytes and gives the same bits in
everything that can still be read. Nothing about allocation changes: addresses, peaks and plans are those of the calls
as they were made. VKFOLD_FUSION=0 switches it off; `engine.fusion.report()` says what it did.

No call is lost. The engine compiles a call's kernels before it comes into the window, so what is wrong with one is an
error of the call itself. What fails at the launch all the same (an interrupt, no memory) leaves the call where it was,
to be tried again; a joint call that cannot be made is taken apart. A call of which part is recorded, or that cannot be
made at all, is given up, and what it should have made is never read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .errors import OutOfDeviceMemoryError
from .op import Cost, Op
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from .fusion_apart import Apart
    from .recorder import Recorder
    from .variant_choice import ChoiceState

WINDOW = 6  # calls held back: a value that is dropped has mostly been dropped that many ops later

Range = tuple[int, int]  # first byte, and the byte behind the last


class Call:
    """One op that is recorded and not launched yet. Holds addresses and no share in any storage.

    made: outputs, then temporaries. alive: for each output whether anybody can still read it. parts: names of the ops
    that were called. joined: the two calls that it replaces. whole: the call of which it is what a late merge left.
    scope: the profiler's. identity: equal for calls of one op with equal specs and settings. choices: what its kernels'
    variants were chosen by when it was made, None where it has none.
    """

    __slots__ = (
        "_reads",
        "_writes",
        "alive",
        "choices",
        "cost",
        "examined",
        "identity",
        "inputs",
        "joined",
        "made",
        "num_outputs",
        "op",
        "parts",
        "scope",
        "settings",
        "whole",
    )

    def __init__(
        self,
        op: Op,
        cost: Cost,
        inputs: Sequence[Tensor | None],
        made: Sequence[Tensor],
        num_outputs: int,
        settings: dict[str, Any],
        alive: Sequence[Callable[[], Any]] | None = None,
        identity: object = None,
    ) -> None:
        self.op = op
        self.cost = cost
        self.settings = settings
        self.num_outputs = num_outputs
        self.examined = False
        self.identity = identity
        self._reads: list[Range] | None = None
        self._writes: list[Range] | None = None
        self.parts: tuple[str, ...] = (op.name,)
        self.joined: tuple[Call, Call] | None = None
        self.whole: Call | None = None
        self.scope: Any = None
        self.choices: ChoiceState | None = None
        if alive is None:
            self.inputs = [None if t is None else borrowed(t) if t.twin is None else t.twin for t in inputs]
            self.made = [borrowed(t) for t in made]
            self.alive: Sequence[Callable[[], Any]] = [t.storage.origin for t in self.made[:num_outputs]]
        else:
            self.alive, self.inputs, self.made = alive, list(inputs), list(made)

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What the op made, without its temporaries."""
        return self.made[: self.num_outputs]

    def is_dead(self, output: int = 0) -> bool:
        """Whether nobody can read an output any more, later calls in the window apart."""
        return self.alive[output]() is None

    def reads(self) -> list[Range]:
        """Bytes it may read."""
        if self._reads is None:
            self._reads = [t.extent for t in self.inputs if t is not None]
        return self._reads

    def writes(self) -> list[Range]:
        """Bytes it may write."""
        if self._writes is None:
            written = self.op.written(len(self.inputs), **self.settings)
            changed = [t for i in written if (t := self.inputs[i]) is not None]
            self._writes = [t.extent for t in (*changed, *self.made)]
        return self._writes

    def written(self) -> list[Tensor]:
        """The tensors it writes: inputs that change, outputs, temporaries."""
        written = self.op.written(len(self.inputs), **self.settings)
        return [*(t for i in written if (t := self.inputs[i]) is not None), *self.made]

    def single_calls(self) -> list[Call]:
        """Itself, or what was joined into it, as the ops were called."""
        return [self] if self.joined is None else [call for part in self.joined for call in part.single_calls()]


class Merge(NamedTuple):
    """What a rule found: the earlier call's place in the window, the call that replaces both, and at whose place."""

    rule: str
    first: int
    call: Call
    at_first: bool


class LateMerge(NamedTuple):
    """What a late rule found: what is left of the call that is about to be launched (None: nothing), the place of a
    later call among those behind it, and what takes that one's place.
    """

    rule: str
    first: Call | None
    place: int
    call: Call


Rule = Callable[[Sequence[Call]], "Merge | None"]
LateRule = Callable[[Call, Sequence[Call]], "LateMerge | None"]


class Fired(NamedTuple):
    """How often a rule fired, the launches it saved, and the bytes that the calls it joined moved before and after."""

    times: int
    launches_saved: int
    bytes_before: int
    bytes_after: int


def borrowed(tensor: Tensor) -> Tensor:
    """The same bytes without a share in their storage: it does not keep them from being reused."""
    storage = tensor.storage
    twin = storage.twin
    if twin is None:
        twin = Storage(storage.handle, storage.nbytes, storage.address, None)
        twin.origin = weakref.ref(storage)
        storage.twin = twin
    found = tensor.twin = Tensor(tensor.engine, tensor.spec, twin, tensor.offset)
    return found


def extent(tensor: Tensor) -> Range:
    """The bytes of a tensor."""
    return tensor.extent


def overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether any of the ranges share a byte."""
    for a, b in some:
        for c, d in others:
            if a < d and c < b:
                return True
    return False


def without(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """The ranges that lie in none of the others."""
    return [a for a in some if not any(b[0] <= a[0] and a[1] <= b[1] for b in others)]


def can_move(call: Call, across: Sequence[Call]) -> bool:
    """Whether a call gives the same when carried out on the other side of the calls between."""
    reads, writes = call.reads(), call.writes()
    for other in across:
        their_writes = other.writes()
        if overlap(writes, their_writes) or overlap(reads, their_writes) or overlap(writes, other.reads()):
            return False
    return True


class Launcher(Protocol):
    """What launches the calls: the engine.

    launch_call: record it. can_launch: whether the kernels of a joint call can be compiled; compiles them. refuse: it
    failed at the launch, so that such calls are joined no more. give_up: these calls will never be launched, because of
    an error. take_apart: what becomes of a joined call among those held back that is not launched, or that reads bytes
    never made. recorder: counts the commands it records.
    """

    recorder: Recorder

    def launch_call(self, call: Call) -> None: ...

    def can_launch(self, call: Call) -> bool: ...

    def refuse(self, call: Call, error: Exception) -> None: ...

    def give_up(self, calls: Sequence[Call], error: BaseException) -> None: ...

    def take_apart(self, call: Call, held_back: Sequence[Call], never_made: Sequence[Range]) -> Apart: ...


class Fusion:
    """The window. rules: op name -> rules to try when a call of that op is the later one. late_rules: op name -> the
    rule to try when a call of that op is about to be launched, given it and those behind it: its outputs may be dead.
    """

    def __init__(
        self,
        launcher: Launcher,
        rules: dict[str, Sequence[Rule]],
        late_rules: dict[str, LateRule] | None = None,
    ) -> None:
        self._launcher = launcher
        self._launch, self._recorder = launcher.launch_call, launcher.recorder
        self._rules = rules
        self._late_rules = late_rules or {}
        self._calls: list[Call] = []
        self._newest: Call | None = None  # the call being added, or what it was joined into
        self._progress = 0  # calls launched or given up
        self._launching = False
        self._fired: dict[str, Fired] = {}
        self.num_calls = 0

    def add(self, call: Call) -> None:
        """Take a call into the window; what falls out of it is launched. When that fails, the call was not made."""
        calls = self._calls
        if calls and not calls[-1].examined:
            self._examine()
        if len(calls) < WINDOW:
            calls.append(call)
        else:
            before, progress = calls.copy(), self._progress
            try:
                calls.append(call)
                self._newest = call
                while len(calls) > WINDOW:  # by more than one when a joined call was taken apart
                    self._launch_first()
            except BaseException:
                kept = before if self._progress == progress else calls
                calls[:] = [other for other in kept if other is not self._newest]
                raise
            finally:
                self._newest = None
        self.num_calls += 1

    def drain(self) -> None:
        """Launch everything. Called before anything else is recorded; a launch that records changes nothing here.

        Raises what a launch raises: see the head of this file for what becomes of the call.
        """
        if self._launching or not self._calls:
            return
        self._examine()
        while self._calls:
            self._launch_first()

    def discard(self) -> None:
        """Forget what is held back: nobody will read it any more."""
        self._calls.clear()

    def report(self) -> dict[str, Fired]:
        """What each rule did since the engine was made or `reset_report`."""
        return dict(self._fired)

    def reset_report(self) -> None:
        """Start counting anew."""
        self._fired.clear()
        self.num_calls = 0

    def _launch_first(self) -> None:
        calls = self._calls
        late = self._late_rules.get(calls[0].op.name)
        if late is not None and self._merge_late(late):
            return
        call, recorder = calls[0], self._recorder
        num_commands = recorder.num_commands
        try:
            self._launching = True
            self._launch(call)
            self._progress += 1
            del calls[0]
        except BaseException as error:
            again = not isinstance(error, Exception) or isinstance(error, (MemoryError, OutOfDeviceMemoryError))
            if calls and calls[0] is call:
                nothing_recorded = recorder.num_commands == num_commands
                if nothing_recorded and isinstance(error, Exception) and not again and self._take_apart(error):
                    return
                if not (again and nothing_recorded):
                    self._give_up(error)
            raise
        finally:
            self._launching = False

    def _take_apart(self, error: Exception) -> bool:
        """Put the parts of the first call, which failed at the launch, in its place; False where that cannot be."""
        call = self._calls[0]
        if call.whole is not None:  # nothing has come before it since: it writes what is still its own
            parts = [call.whole]
        elif call.joined is not None:
            parts, lost, _ = self._launcher.take_apart(call, self._calls, ())
            if lost:  # there is no memory for what the joint call left out
                return False
        else:
            return False
        self._launcher.refuse(call, error)
        self._calls[:1] = parts
        return True

    def _give_up(self, error: BaseException) -> None:
        """Give up the first call, and those that read what it should have made; of a joined call the parts that do."""
        first, *others = self._calls
        given_up, never_made, kept = [first], list(first.writes()), []
        for call in others:
            if not overlap(call.reads(), never_made):
                kept.append(call)
                never_made = without(never_made, call.writes())
            elif call is self._newest:  # was not made, and changes nothing: `add`
                continue
            elif call.joined is None:
                given_up.append(call)
                never_made += call.writes()
            else:
                parts, lost, never_made = self._launcher.take_apart(call, self._calls, never_made)
                kept += parts
                given_up += lost
        self._progress += 1
        self._launcher.give_up(given_up, error)
        self._calls[:] = kept

    def _merge_late(self, rule: LateRule) -> bool:
        """Whether nothing is left of the first call."""
        call, *behind = self._calls
        found = rule(call, behind)
        if found is None:
            return False
        last = behind[found.place]
        before = call.cost.bytes_moved + last.cost.bytes_moved
        after = found.call.cost.bytes_moved + (0 if found.first is None else found.first.cost.bytes_moved)
        joint = [found.call] if found.first is None else [found.first, found.call]
        if after >= before or not all(self._can_join(call, last, one) for one in joint):
            return False
        found.call.parts, found.call.joined = call.parts + last.parts, (call, last)
        found.call.scope = last.scope
        found.call.examined = last.examined
        if last is self._newest:
            self._newest = found.call
        behind[found.place] = found.call
        if found.first is not None:
            found.first.scope, found.first.whole = call.scope, call
            behind.insert(0, found.first)
        self._calls[:] = behind
        self._count(found.rule, found.first is None, before, after)
        return found.first is None

    def _can_join(self, first: Call, last: Call, joint: Call) -> bool:
        """Whether the kernels of a joint call can be compiled, with the variants that both calls chose."""
        if first.choices is not None and last.choices is not None and first.choices != last.choices:
            return False
        joint.choices = first.choices or last.choices
        return self._launcher.can_launch(joint)

    def _count(self, rule: str, saves_launch: bool, before: int, after: int) -> None:
        sums = self._fired.get(rule, (0, 0, 0, 0))
        self._fired[rule] = Fired(sums[0] + 1, sums[1] + saves_launch, sums[2] + before, sums[3] + after)

    def _examine(self) -> None:
        calls = self._calls
        last = calls[-1]
        last.examined = True
        for rule in self._rules.get(last.op.name, ()):
            found = rule(calls)
            if found is not None:
                before = calls[found.first].cost.bytes_moved + last.cost.bytes_moved
                after = found.call.cost.bytes_moved
                if after >= before or not self._can_join(calls[found.first], last, found.call):
                    continue
                self._count(found.rule, True, before, after)
                found.call.examined = True  # it is the next call's partner as it stands
                first = calls[found.first]
                found.call.parts, found.call.joined = first.parts + last.parts, (first, last)
                found.call.scope = first.scope
                between = calls[found.first + 1 : -1]
                calls[found.first :] = [found.call, *between] if found.at_first else [*between, found.call]
                return
