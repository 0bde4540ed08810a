"""Elementwise kernels from expressions or GLSL: several inputs and outputs, any size, 16-byte loads where aligned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .expr import RANDOM, Expr
from .expr_glsl import KINDS, glsl_includes, glsl_statements
from .expr_numpy import evaluate
from .expr_walk import topological
from .kernel import SHADER_DIR, Kernel, is_own_shader, read_shader
from .kernel_text import KernelText, frozen
from .map_choice import MapChooser, tuning_key
from .map_variants import SIZES, MapVariant, map_variants
from .ops.map_check import has_variants, right_map
from .tensor import Tensor
from .variant_choice import ask_state, choice_state

if TYPE_CHECKING:
    from .recorder import Recorder
    from .vulkan_engine import VulkanEngine

_WIDE = """
vec4 load_four(F32 p, uint i) { return read4(F32x4(uvec2(p)), i >> 2); }
void store_four(F32 p, uint i, vec4 value) { write4(F32x4(uvec2(p)), i >> 2, value); }
void main() {
    const uint whole = args.num_elements / 4u, start = group_index() * gl_WorkGroupSize.x * STEPS;
    [[unroll]] for (uint turn = 0; turn < STEPS; ++turn) {
        const uint group = start + turn * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
        if (group < whole) {
            const uint index = group * 4u;
%(vec4)s
        }
    }
    if (TAIL != 0 && whole - start < gl_WorkGroupSize.x * STEPS) {
        for (uint index = whole * 4u + gl_LocalInvocationID.x; index < args.num_elements; index += gl_WorkGroupSize.x) {
%(float)s
        }
    }
}
"""

_NARROW = """
void main() {
    const uint start = group_index() * gl_WorkGroupSize.x * STEPS;
    [[unroll]] for (uint turn = 0; turn < STEPS; ++turn) {
        const uint index = start + turn * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
        if (index < args.num_elements) {
%(float)s
        }
    }
}
"""


_ARGUMENT, _UNSIGNED = re.compile(r"\bargs\.(\w+)"), re.compile(r"\b(\d+)u\b")  # in the place of an operand


class Operand(NamedTuple):
    """One value of a map kernel: its name in the body, the pointer it lies behind, and its place there.

    place: GLSL expression of `index` (the element being worked on) and `args`; `index` unless the layouts differ. In
    the wide kernel it is taken for every fourth index and must be a multiple of 4 there, unless one_for_four, which
    says that those four elements share one value (inputs only). Kernels whose places are arithmetic of + - * / % have
    variants.
    """

    name: str
    pointer: str
    place: str = "index"
    one_for_four: bool = False

    @classmethod
    def of(cls, what: str | Operand) -> Operand:
        """A name alone is a pointer of that name."""
        return what if isinstance(what, Operand) else cls(what, what)

    def indices(self, index: np.ndarray, scalars: Mapping[str, float]) -> np.ndarray:
        """Where the elements `index` are found: the place's own arithmetic of whole numbers, in Python."""
        text = _ARGUMENT.sub(lambda match: str(int(scalars[match.group(1)])), self.place)
        text = _UNSIGNED.sub(r"\1", text).replace("/", "//")
        return np.broadcast_to(eval(text, {"__builtins__": {}}, {"index": index}), index.shape)


class MapPlan(NamedTuple):
    """The dispatch of a call, but for its arguments."""

    kernel: Kernel
    num_groups: int


class MapKernel:
    """An elementwise kernel and its launch.

    inputs, outputs: names or Operands; one that is in both is changed in place. body: an expression for each
    output, of variables named as the inputs and scalars; or GLSL statements that assign every output from the inputs,
    which are compiled once with `T` float and once with `T` vec4, and see `index`, the index of the (first) element.
    scalars: kernel arguments behind the pointers, "float factor, uint width"; a float one is a variable, a uint one a
    whole number of the expressions. step: GLSL statements read `args.step` (expressions with random numbers bring it
    themselves). includes: files of shaders/ the body needs; raises ValueError for any other.

    The kernel has one pointer for each distinct one of inputs and outputs, in order of appearance.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str | Operand],
        outputs: Sequence[str | Operand],
        body: str | Mapping[str, Expr],
        *,
        scalars: str = "",
        step: bool = False,
        includes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.inputs = tuple(Operand.of(what) for what in inputs)
        self.outputs = tuple(Operand.of(what) for what in outputs)
        self.expressions: Mapping[str, Expr] = frozen({} if isinstance(body, str) else body)
        words = [part.split() for part in scalars.split(",") if part]
        self.scalars: Mapping[str, str] = frozen({scalar: what for what, scalar in words})  # type by name
        self.takes_step = step or any(node.op in RANDOM for node in topological(self.expressions.values()))
        access: dict[str, str] = {operand.pointer: "in" for operand in self.inputs}
        for operand in self.outputs:
            access[operand.pointer] = "inout" if access.get(operand.pointer, "out") in ("in", "inout") else "out"
        args = [f"{how} f32 {pointer}" for pointer, how in access.items()]
        args += ["step"] * self.takes_step + [scalars] * bool(scalars) + ["uint num_elements"]
        joined = ", ".join(args)
        self.pointers = tuple(access)
        self.reaches_pointers = isinstance(body, str) and any(
            re.search(rf"\bargs\s*\.\s*{pointer}\b", body) for pointer in access
        )
        self._has_variants: dict[bool, bool] = {}
        given, files = body if isinstance(body, str) else self.expressions, tuple(includes)
        for file in files:
            if not is_own_shader(file):
                raise ValueError(f"map kernel {name!r}: {file!r} is no file of {SHADER_DIR}: make it part of the body")
        what = (self.inputs, self.outputs, given, self.scalars, files)
        wide = KernelText(("wide map", what), lambda: self._text(given, files, wide=True))
        narrow = KernelText(("narrow map", what), lambda: self._text(given, files, wide=False))
        size, wide_only = SIZES[-1], {"STEPS": 1, "TAIL": 1}
        self.wide = Kernel(name + "_vec4", wide, joined, local_size=size, constants=wide_only, family="map")
        self.narrow = Kernel(name + "_scalar", narrow, joined, local_size=size, constants={"STEPS": 1}, family="map")
        self._variants: dict[tuple[MapVariant, bool, bool], Kernel] = {}

    def _text(self, body: str | Mapping[str, Expr], includes: Sequence[str], *, wide: bool) -> str:
        bodies = {}
        for kind in KINDS if wide else KINDS[:1]:
            names = {
                scalar: f"args.{scalar}" if what == "uint" else f"{kind}(args.{scalar})"
                for scalar, what in self.scalars.items()
            }
            text = body if isinstance(body, str) else glsl_statements(body, kind, names)
            bodies[kind] = _statements(kind, self.inputs, self.outputs, text)
        text = "".join(read_shader(include) for include in (*includes, *glsl_includes(self.expressions.values())))
        return text + (read_shader("words.glsl") + _WIDE % bodies if wide else _NARROW % bodies)

    def reference(self, **arrays: Any) -> list[Any]:
        """The outputs in NumPy, in the order of the expressions, from arrays and scalars by name (and `step`)."""
        return evaluate(self.expressions.values(), **arrays)

    def kernels(self) -> Iterable[Kernel]:
        """Both widths."""
        return (self.wide, self.narrow)

    def variant(self, choice: MapVariant, *, wide: bool, tail: bool) -> Kernel:
        """The kernel of a variant. tail: whether a wide one does the elements behind the last four."""
        tail = tail and wide
        found = self._variants.get((choice, wide, tail))
        if found is None:
            kernel = self.wide if wide else self.narrow
            constants = {"STEPS": choice.steps} | ({"TAIL": int(tail)} if wide else {})
            suffix = f"_{choice.name}{'_tail' * tail}"
            found = kernel.specialized(suffix, local_size=choice.size, constants=constants)
            self._variants[choice, wide, tail] = found
        return found

    def has_variants(self, *, wide: bool) -> bool:
        """Whether its variants can be checked; one whose places are not understood has the base variant alone."""
        if wide not in self._has_variants:
            self._has_variants[wide] = has_variants(self, wide=wide)
        return self._has_variants[wide]

    def num_groups(self, choice: MapVariant, num_elements: int, *, wide: bool) -> int:
        """Workgroups of a variant for so many elements."""
        return -(-num_elements // (choice.pieces * (4 if wide else 1)))

    def launch(self, gpu: Recorder | VulkanEngine, num_elements: int, *args: Tensor | float, wide: bool = True) -> None:
        """Record it. args: tensors, then scalars. wide=False where places are not multiples of 4."""
        addresses = 0
        for arg in args[: len(self.pointers)]:
            addresses |= arg.address  # type: ignore[union-attr]
        wide = wide and not addresses % 16
        chooser = gpu.choosers.get(MapChooser)
        plan = chooser and chooser.plans.get((self, num_elements, wide, ask_state()))
        kernel, num_groups = plan or self._plan(gpu, num_elements, wide)
        gpu.dispatch(kernel, num_groups, *args, num_elements)

    def _plan(self, on: Recorder | VulkanEngine, num_elements: int, wide: bool) -> MapPlan:
        """Choose a variant that is known to be right, and work out its dispatch. Kept, since steps repeat."""
        gpu: Recorder = getattr(on, "recorder", on)  # type: ignore[arg-type]
        chooser, tail = MapChooser.of(gpu), num_elements % 4 != 0
        kernel, width = (self.wide, 4) if wide else (self.narrow, 1)
        choice, call = map_variants(kernel.name, gpu.max_invocations)[-1], ""
        while self.has_variants(wide=wide):
            choice = chooser.choose(kernel.name, num_elements, width, gpu.max_invocations)
            call = tuning_key(kernel.name, num_elements)
            if right_map(gpu, chooser, self, choice, wide=wide, tail=tail):
                break
        plan = MapPlan(self.variant(choice, wide=wide, tail=tail), self.num_groups(choice, num_elements, wide=wide))
        chooser.keep((self, num_elements, wide, choice_state()), plan, call, [plan.kernel] if call else ())
        return plan


def _statements(kind: str, read: Sequence[Operand], written: Sequence[Operand], body: str) -> str:
    # The wide kernel casts pointers in functions: SwiftShader crashes on the cast of a push constant itself.
    load, store = ("args.{0}.v[{1}]", "args.{0}.v[{1}] = {2};")
    if kind == "vec4":
        load, store = ("load_four(args.{0}, {1})", "store_four(args.{0}, {1}, {2});")
    lines = ["#define T " + kind]
    for operand in read:
        one = "vec4(args.{0}.v[{1}])" if operand.one_for_four and kind == "vec4" else load
        lines.append(f"T {operand.name} = {one.format(operand.pointer, operand.place)};")
    names = {operand.name for operand in read}
    lines += [f"T {operand.name};" for operand in written if operand.name not in names]
    lines.append(body)
    lines += [store.format(operand.pointer, operand.place, operand.name) for operand in written]
    lines.append("#undef T")
    return "\n".join(lines)
