"""What an op is: one shape rule, one cost, one NumPy reference, one Vulkan launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .tensor import TensorSpec

if TYPE_CHECKING:
    from .kernel import Kernel


class Cost(NamedTuple):
    """Work of one call: floating-point operations, and bytes each tensor moves if read and written once."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


class Op:
    """Base of all ops. An instance is stateless; its inputs are tensors or None (optional ones left out).

    Subclasses define, with the op's own inputs as positional and its settings as keyword parameters:

    - `outputs(*specs, **settings)`: TensorSpecs of what it allocates; raises ValueError naming a wrong shape.
    - `reference(*arrays, **settings)`: NumPy arrays of the outputs. Keeps the arrays' float type (float32, or float64
      as the oracle) and changes arrays listed in `writes` in place.
    - `launch(gpu, inputs, outputs, **settings)`: calls `gpu.dispatch(kernel, num_groups, *arguments)`.
    - `flops(*specs, **settings)`: floating-point operations.
    - `kernels()`: every kernel the launch can ask for, to be compiled ahead of time.

    `writes` lists the positions of inputs that are changed in place (`written(num_inputs, **settings)` where their
    number varies); they must not overlap another input, but where `may_coincide` says so. `scratch(*specs,
    **settings)` lists temporaries that live for the one call; launch receives them behind the outputs.
    """

    name: str = ""
    writes: tuple[int, ...] = ()
    setting_types: Mapping[str, str] = {}  # annotations that the signature of `outputs` does not have
    takes_step: bool = False  # reference receives step=StepParameters

    outputs: Callable[..., Sequence[TensorSpec]]
    reference: Callable[..., Sequence[Any]]
    launch: Callable[..., None]
    flops: Callable[..., int]

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        """Temporaries of one call; none unless overridden."""
        return ()

    def kernels(self) -> Iterable[Kernel]:
        """Kernels to compile ahead of time; none unless overridden."""
        return ()

    def written(self, num_inputs: int, **settings: Any) -> Sequence[int]:
        """Positions of the inputs that are changed in place: `writes`, unless they depend on the call."""
        return self.writes

    def written_bytes(self, position: int, *specs: TensorSpec | None, **settings: Any) -> tuple[int, int]:
        """First byte and end of what is written of an input in `written`: all of it, unless overridden."""
        spec = specs[position]
        assert spec is not None
        return 0, spec.nbytes

    def may_coincide(self, written: int, read: int, **settings: Any) -> bool:
        """Whether the input at `written`, changed in place, and the one at `read` may be the same bytes.

        True where each element of the one is read before, and by whom, that element of the other is written.
        """
        return False

    def cost(self, *specs: TensorSpec | None, **settings: Any) -> Cost:
        """FLOPs, and bytes moved when every tensor is read and written once."""
        return self.cost_of(specs, settings, self.outputs(*specs, **settings), self.written(len(specs), **settings))

    def cost_of(
        self,
        specs: Sequence[TensorSpec | None],
        settings: Mapping[str, Any],
        outputs: Sequence[TensorSpec],
        written: Sequence[int],
    ) -> Cost:
        """`cost`, of a call whose outputs and inputs that change are known."""
        changed = [spec.nbytes for i in written if (spec := specs[i]) is not None]
        read = sum([spec.nbytes for spec in specs if spec is not None])
        bytes_written = sum([spec.nbytes for spec in outputs]) + sum(changed)
        return Cost(self.flops(*specs, **settings), read, bytes_written)

    def __repr__(self) -> str:
        return f"Op({self.name})"


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Enter an op into the table that planning, profiling and ahead-of-time compilation go through."""
    if op.name in OPS:
        raise ValueError(f"two ops are called {op.name!r}")
    OPS[op.name] = op
    return op
