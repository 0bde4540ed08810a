"""Launches the calls that fusion held back: their kernels compiled before, joint calls tried first, failures noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import OutOfDeviceMemoryError
from .fusion_apart import Apart, take_apart
from .never_made import NeverMade
from .op import Op
from .switches import logger
from .tensor import Tensor
from .variant_choice import ChoosingAs, VariantChooser, choice_state

if TYPE_CHECKING:
    from .compute_engine import Rule
    from .fusion import Call, Range
    from .vulkan_engine import VulkanEngine

_MOST_JOINT = 4096
Rehearse = Callable[[Op, Sequence[Tensor | None], Sequence[Tensor], Any], None]


class OpLauncher:
    """What an engine's calls go through. launch_call: records one. rehearse: compiles what recording one will need."""

    def __init__(self, engine: VulkanEngine, launch_call: Callable[[Call], None], rehearse: Rehearse) -> None:
        self.recorder = engine.recorder
        self.launch_call = launch_call
        self._engine = engine
        self._rehearse = rehearse
        self._joint: dict[Any, bool] = {}

    def make_ready(
        self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: Sequence[Tensor], settings: Any
    ) -> None:
        """Compile the kernels of a call, unless calls of the kind came before. Raises what recording it would raise.

        They count no more once variants are chosen otherwise: a program may change VKFOLD_VARIANT while it runs.
        """
        state = choice_state()
        if rule.choice_state is not None and rule.choice_state != state:
            rule.ready.clear()
            rule.ready_aligned = False
        alignment = tuple([0 if t is None else t.address & 15 for t in inputs])
        if alignment not in rule.ready:
            num_asked = VariantChooser.num_asked
            self._rehearse(op, inputs, made, settings)
            if VariantChooser.num_asked != num_asked:
                rule.choice_state = state
            rule.ready.add(alignment)
            if not any(alignment):
                rule.ready_aligned = True

    @staticmethod
    def kind_of(call: Call) -> Any:
        """Equal for calls that need the same kernels."""
        addresses, key = 0, call.identity
        for tensor in call.inputs:
            if tensor is not None:
                addresses |= tensor.address
        for tensor in call.made:
            addresses |= tensor.address
        if key is None:
            settings = call.settings
            key = call.op, *[None if t is None else t.spec for t in call.inputs], *settings, *settings.values()
        if addresses & 15:
            key = key, *[0 if t is None else t.address & 15 for t in (*call.inputs, *call.made)]
        return key if call.choices is None else (key, call.choices)

    def can_launch(self, call: Call) -> bool:
        """Whether the kernels of a joint call can be compiled; compiles them."""
        key = self.kind_of(call)
        found = self._joint.get(key)
        if found is not None:
            return found
        try:
            with ChoosingAs(call.choices):
                self._rehearse(call.op, call.inputs, call.made, call.settings)
        except (MemoryError, OutOfDeviceMemoryError):
            return False
        except Exception as error:
            self.refuse(call, error)
            return False
        self._note(key, True)
        return True

    def refuse(self, call: Call, error: Exception) -> None:
        """Such calls are joined no more: one failed."""
        # Its text, not the error: somebody may keep log records, and it would keep tensors.
        logger.warning("%s: not joined, the calls are launched apart: %s", " + ".join(call.parts), str(error))
        self._note(self.kind_of(call), False)

    def _note(self, key: Any, can_launch: bool) -> None:
        if len(self._joint) >= _MOST_JOINT:
            self._joint.clear()
        self._joint[key] = can_launch

    def take_apart(self, call: Call, held_back: Sequence[Call], never_made: Sequence[Range]) -> Apart:
        """What becomes of a joined call among those held back that fails, or reads bytes that were never made."""
        return take_apart(call, held_back, never_made, lambda spec: self._engine.empty(spec.shape, spec.dtype))

    def give_up(self, calls: Sequence[Call], error: BaseException) -> None:
        """These calls will not be launched, or only in part: what they should have made is never read."""
        engine = self._engine
        if engine.never_made is None:
            engine.never_made = NeverMade()
        engine.never_made.note(calls, error)
