"""The layer contract: explicit forward and backward, what is kept between them, and how it is kept small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.allocation_ledger import RECOMPUTED
from ..engine.compute_engine import ComputeEngine
from ..engine.errors import MissingActivationError
from ..engine.input_checks import described
from ..engine.tensor import Tensor
from .mode_watch import Watched
from .parameter import Parameter
from .recompute_check import RecomputeCheck


class Layer(Watched):
    """Base of all layers. A layer of your own defines `forward` and `backward`:

        class Square(Layer):
            def forward(self, x):
                self.start_forward()
                self.keep(x=x)
                return self.engine.multiply(x, x)

            def backward(self, dy):
                return self.engine.scale(self.engine.multiply(dy, self.take("x")), 2.0)

    What backward needs is kept by name with `keep` and handed back once with `take`: after `backward` nothing is kept.
    In checkpoint mode, and when not training, `keep` drops what it is given, and `take` raises
    MissingActivationError, so a backward never computes with a stale tensor.

    Attributes that are Parameters, Layers or lists of Layers are found by `named_parameters` and `children`, in the
    order in which they were set.

    `replay_supported = True` in the class itself says that nothing but its attributes and the shapes of its inputs
    decides which ops it records; TrainingStep then replays unchanged steps (docs/replay.md).
    """

    recompute_supported = True

    def __init__(self, engine: ComputeEngine) -> None:
        self.engine = engine
        self.training = True
        self.checkpoint_mode = False
        self.kept: dict[str, Tensor] = {}
        self.recompute_check: RecomputeCheck | None = None
        self.path = ""  # dotted name in the model

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            cls = type(self).__name__
            if "kept" not in vars(self):  # Layer's own attributes are not there
                raise AttributeError(
                    f"{cls} has no attribute {name!r}: {cls}.__init__ must call super().__init__(engine) first"
                )
            raise AttributeError(f"{cls!r} object has no attribute {name!r}")

    # -- computing ---------------------------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """The layer's output."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def backward(self, dy: Any) -> Any:
        """Gradient with respect to the input of the last forward; adds to the gradients of the parameters.

        Raises MissingActivationError when that forward kept nothing, or was already gone back through.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no backward")

    def forward_recompute(self, saved_input: Any) -> Any:
        """Run forward once more on a saved input, this time keeping what backward needs, whatever the mode.

        Dropout repeats its mask as long as the engine's step parameters are those of the first run.
        """
        if not self.recompute_supported:
            raise ValueError(f"{type(self).__name__} cannot be recomputed")
        mode = self.checkpoint_mode
        self.set_checkpoint_mode(False)
        try:
            return self.forward(saved_input)
        finally:
            self.set_checkpoint_mode(mode)

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    # -- what is kept ------------------------------------------------------------------------------------------------
    @property
    def keeps(self) -> bool:
        """Whether this forward keeps anything for backward."""
        return self.training and not self.checkpoint_mode

    def start_forward(self) -> None:
        """Forget what an earlier forward kept. First line of every forward."""
        self.kept.clear()

    def keep(self, **tensors: Tensor) -> None:
        """Keep tensors for backward under these names, unless nothing is to be kept."""
        self.made(**tensors)
        if self.keeps:
            self.kept.update(tensors)

    def made(self, **tensors: Tensor) -> None:
        """Tell the recomputation check, if there is one, of tensors that backward makes again."""
        if self.recompute_check is not None and self.training:
            for name, tensor in tensors.items():
                self.recompute_check.see(f"{self.path}.{name}", tensor)

    def made_again(self, **tensors: Tensor) -> None:
        """Tell the check that backward made these again. Raises RecomputeMismatchError when one is not the same."""
        if self.recompute_check is not None:
            for name, tensor in tensors.items():
                self.recompute_check.compare(f"{self.path}.{name}", tensor)

    def recomputed(self, **tensors: Tensor) -> None:
        """`made_again` for what was freed in forward to be rebuilt: booked as such, beside being checked."""
        for name, tensor in tensors.items():
            self.engine.note_kind(tensor, RECOMPUTED, f"{self.path}.{name}".lstrip("."))
        self.made_again(**tensors)

    def take(self, name: str) -> Tensor:
        """Hand back a kept tensor and forget it. Raises MissingActivationError when it is not there."""
        try:
            return self.kept.pop(name)
        except KeyError:
            raise self.missing(name) from None

    def missing(self, name: str) -> MissingActivationError:
        """The error for a kept tensor that is not there."""
        if not self.training:
            why = "the layer is not training (set_training(True) before forward)"
        elif self.checkpoint_mode:
            why = "the layer is in checkpoint mode: call forward_recompute(saved_input) first"
        else:
            why = "call forward first, and backward once for each forward"
        return MissingActivationError(f"{type(self).__name__}.backward: {name!r} is not kept; {why}")

    def activation_cache(self) -> dict[str, Tensor]:
        """Every tensor kept for backward, sublayers included, by dotted name."""
        cache = dict(self.kept)
        for prefix, child in self.children():
            cache.update({f"{prefix}.{name}": tensor for name, tensor in child.activation_cache().items()})
        return cache

    def release_cache(self) -> None:
        """Forget everything kept, sublayers included."""
        self.kept.clear()
        for _, child in self.children():
            child.release_cache()

    def set_checkpoint_mode(self, on: bool) -> None:
        """In checkpoint mode no intermediates are kept; the caller saves the input and calls `forward_recompute`.

        Passed on through each sublayer's own method. What the last forward kept stays until used or until the next one.
        """
        self.checkpoint_mode = bool(on)
        for _, child in self.children():
            child.set_checkpoint_mode(on)

    def set_recompute_check(self, check: RecomputeCheck | None, path: str = "") -> None:
        """Have everything that is recomputed compared with what it was, sublayers included; None: stop."""
        self.recompute_check, self.path = check, path
        for name, child in self.children():
            child.set_recompute_check(check, f"{path}.{name}" if path else name)

    def set_training(self, on: bool) -> None:
        """Off: no dropout, nothing kept, and what was kept is released."""
        self.training = bool(on)
        self.kept.clear()
        for _, child in self.children():
            child.set_training(on)

    # -- structure ---------------------------------------------------------------------------------------------------
    def children(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of each direct sublayer; those in a list are called `list.0`, `list.1`, ..."""
        for attribute in vars(self):
            yield from self._children_of(attribute)

    def _children_of(self, attribute: str) -> Iterator[tuple[str, Layer]]:
        value = getattr(self, attribute)
        if isinstance(value, Layer):
            yield attribute, value
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Layer):
                    yield f"{attribute}.{i}", item

    def named_parameters(self) -> dict[str, Parameter]:
        """Dotted name -> parameter. One that is used in several places appears once, under its first name."""
        found: dict[str, Parameter] = {}
        seen: set[int] = set()
        self._collect("", found, seen)
        return found

    def _collect(self, prefix: str, found: dict[str, Parameter], seen: set[int]) -> None:
        for attribute in vars(self):
            value = getattr(self, attribute)
            if isinstance(value, Parameter):
                if id(value) not in seen:
                    seen.add(id(value))
                    found[prefix + attribute] = value
            elif isinstance(value, (Layer, list)):
                for name, child in self._children_of(attribute):
                    child._collect(f"{prefix}{name}.", found, seen)

    def parameters(self) -> list[Parameter]:
        """The parameters in a fixed order."""
        return list(self.named_parameters().values())

    @property
    def num_parameters(self) -> int:
        """Number of trainable values."""
        return sum(parameter.size for parameter in self.parameters())

    def initialize(self, seed: int | None) -> None:
        """Give every parameter its starting values: a random stream per name, so that the order does not matter.

        None leaves the values undefined (a composite does that for its sublayers, then initializes all at once).
        """
        if seed is not None:
            for name, parameter in self.named_parameters().items():
                parameter.initialize(name, seed)

    def clear_gradients(self) -> None:
        """Give the memory of all gradients back."""
        for parameter in self.parameters():
            parameter.clear_gradient()

    # -- values ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, np.ndarray]:
        """Dotted name -> values of every parameter."""
        return {name: parameter.data.numpy() for name, parameter in self.named_parameters().items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite every parameter, or change nothing.

        Raises ValueError that lists missing and unexpected names and wrong shapes, or names what float32 cannot hold.
        """
        parameters = self.named_parameters()
        check_names(type(self).__name__, {name: p.shape for name, p in parameters.items()}, state)
        self.engine.upload_all({name: p.data for name, p in parameters.items()}, state)


def check_names(what: str, expected: Mapping[str, tuple[int, ...]], state: Mapping[str, np.ndarray]) -> None:
    """Compare names and shapes. Raises TypeError for no mapping, ValueError that lists every difference."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: {described(state)}, needed is a dict of name -> array (vf.load gives one)")
    problems = [f"missing: {name}" for name in expected if name not in state]
    problems += [f"unexpected: {name}" for name in state if name not in expected]
    for name, shape in expected.items():
        if name in state and tuple(np.shape(state[name])) != tuple(shape):
            problems.append(f"{name}: shape {tuple(np.shape(state[name]))}, expected {tuple(shape)}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"the state does not fit this {what}: {shown}")
