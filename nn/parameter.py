"""A trainable tensor, its gradient, and how it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from ..engine.allocation_ledger import GRADIENTS
from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .mode_watch import Watched


class Parameter(Watched):
    """A trainable tensor in the parameter pool.

    `data` holds the values; `grad` the gradient of the current step, or None. A gradient is allocated in the step pool
    only when backward reaches it, so that early in backward most gradients do not exist yet.

    init: "normal" (mean 0, standard deviation `std`), "ones" or "zeros". Values are undefined until `initialize`.
    num_uses: how many layers contribute to the gradient in one backward (2 for a tied embedding); after that many
    contributions `on_complete(self)`, if set, is called: the gradient of this micro-batch is then complete.

    Raises ValueError for another init.
    """

    unwatched = frozenset({"_contributions"})

    def __init__(self, engine: ComputeEngine, shape: Sequence[int], init: str = "normal", std: float = 0.02) -> None:
        if init not in ("normal", "ones", "zeros"):
            raise ValueError(f"unknown init {init!r}: use normal, ones or zeros")
        self.engine = engine
        self.init = init
        self.std = std
        with engine.parameter_pool():
            self.data: Tensor = engine.empty(shape)
        self.grad: Tensor | None = None
        self.num_uses = 1
        self.on_complete: Callable[[Parameter], None] | None = None
        self._contributions = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values and of the gradient."""
        return self.data.shape

    @property
    def size(self) -> int:
        """Number of values."""
        return self.data.size

    def initialize(self, name: str, seed: int) -> None:
        """Fill with starting values that depend on (name, seed, init, std, shape) and on nothing else."""
        if not self.engine.computes:  # a 70B model is planned without drawing its weights
            return
        if self.init == "normal":
            words = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint32)
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *words.tolist()])))
            values = generator.standard_normal(self.shape, dtype=np.float32)
            values *= np.float32(self.std)
        else:
            values = np.full(self.shape, 1.0 if self.init == "ones" else 0.0, np.float32)
        self.engine.upload(self.data, values)

    def gradient(self) -> tuple[Tensor, bool]:
        """Where to write the gradient, and whether to add to what is there (False: it is undefined, overwrite it)."""
        if self.grad is None:
            self.grad = self.engine.empty(self.shape)
            self.engine.note_kind(self.grad, GRADIENTS)
            return self.grad, False
        return self.grad, True

    def gradient_written(self) -> None:
        """Called by a layer after each contribution to the gradient."""
        self._contributions += 1
        if self._contributions >= self.num_uses:
            self._contributions = 0
            if self.on_complete is not None:
                self.on_complete(self)

    def clear_gradient(self) -> None:
        """Give the gradient's memory back."""
        self.grad = None
        self._contributions = 0

    def __repr__(self) -> str:
        return f"Parameter(shape={self.shape}, grad={'yes' if self.grad is not None else 'no'})"
