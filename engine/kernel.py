"""A kernel: GLSL text, typed arguments, sizes. Everything the compiler and the recorder need, and no Vulkan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from .errors import VkfoldError
from .kernel_arguments import arguments_of
from .kernel_text import KernelText, Printed, known_text, note_text
from .step_parameters import GLSL_STRUCT

SHADER_DIR = Path(__file__).resolve().parent.parent / "shaders"

_VERSION = "#version 460\n"
_WORDS64 = "#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require\n"
_HEADER = """#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference2 : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_scalar_block_layout : enable
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require
layout(buffer_reference, std430, buffer_reference_align = 4) buffer F32 { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer F32x4 { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer U32 { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer I32 { int v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) buffer U32x2 { uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer U32x4 { uvec4 v[]; };
"""

_INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)


@cache
def read_shader(name: str) -> str:
    """The text of a file in shaders/, its #include lines replaced by the files they name."""
    text = (SHADER_DIR / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: read_shader(match.group(1)), text)


@cache
def is_own_shader(name: str) -> bool:
    """Whether this is the name of a file of shaders/, which tells its content to one version of the package."""
    return isinstance(name, str) and Path(name).name == name and (SHADER_DIR / name).is_file()


def _is_file(source: str | KernelText) -> bool:
    return isinstance(source, str) and source.endswith(".comp")


class Kernel:
    """A compute kernel, known by its text.

    name: for people (profiles, errors). source: a file of shaders/ (ends in .comp), or GLSL text with a `void main()`,
    which as a `KernelText` is printed only where no compiled kernel is known for it.
    args: comma-separated, pointers before scalars, for example
    "in f32 x[n], out f32 y[n], step, uint n, float eps"; in GLSL they are `args.x`, `args.n`, ... and the hidden last
    argument gives `group_index()`, the linear workgroup index (dispatches are one-dimensional and may be split). The
    count in brackets may be left out; where it is given, `VulkanEngine.dispatch` refuses a tensor with fewer elements.
    local_size: invocations a workgroup, or subgroups: whole subgroups a workgroup (size from the device); in GLSL the
    size is `gl_WorkGroupSize.x`. defines: preprocessor names and values. extensions: GLSL extensions beyond the usual.
    constants: names and values of whole numbers that are put in when the pipeline is made, as the size is: kernels that
    differ in nothing else (`specialized`) are one SPIR-V. family: what VKFOLD_VARIANT calls the family of its variants.

    Raises ValueError for malformed arguments, more than 128 bytes of them, or a file that is not there.
    """

    def __init__(
        self,
        name: str,
        source: str | KernelText,
        args: str,
        *,
        local_size: int = 0,
        subgroups: int = 0,
        defines: dict[str, int | float | str] | None = None,
        extensions: Sequence[str] = (),
        constants: Mapping[str, int] | None = None,
        family: str = "",
    ) -> None:
        for what, text in (("name", name), ("source", source), ("args", args)):
            if not isinstance(text, str) and not (what == "source" and isinstance(text, KernelText)):
                raise TypeError(f"kernel {name!r:.40}: {what} is {text!r:.40}, needed is a string")
        for what, number in (("local_size", local_size), ("subgroups", subgroups)):
            if not isinstance(number, int):
                raise TypeError(f"kernel {name!r}: {what} is {number!r:.40}, needed is a whole number")
        if bool(local_size) == bool(subgroups) or local_size < 0 or subgroups < 0:
            raise ValueError(f"kernel {name!r}: give either local_size or subgroups, a number above 0")
        if _is_file(source) and not is_own_shader(source) and not (SHADER_DIR / str(source)).is_file():
            raise ValueError(
                f"kernel {name!r}: there is no {source!r} in {SHADER_DIR}: give the GLSL text itself "
                "(Path(file).read_text()), or the name of a file there"
            )
        self.name = name
        self.extensions = tuple(extensions)
        self.local_size = local_size
        self.subgroups = subgroups
        self.defines = dict(defines or {})
        self.constants = dict(constants or {})
        self.family = family
        self._source = source
        self._args = args
        try:
            declared = arguments_of(args)
        except ValueError as error:
            raise ValueError(f"kernel {name!r}: {error}") from None
        self.args = declared.args
        self.packer = declared.packer
        self.num_pointers = declared.num_pointers
        self.takes_step, self.step_index = declared.takes_step, declared.step_index
        self.alignment_masks = declared.alignment_masks

    @property
    def body(self) -> str:
        """The source's text."""
        source = self._source
        if isinstance(source, KernelText):
            return source.text
        return read_shader(source) if _is_file(source) else source

    @cached_property
    def glsl(self) -> str:
        """The complete text given to the compiler."""
        members = "".join(f"    {arg.glsl_type} {arg.name};\n" for arg in self.args)
        defines = "".join(f"#define {key} {value}\n" for key, value in self.defines.items())
        return (
            _VERSION
            + "".join(f"#extension {name} : require\n" for name in self.extensions)
            + (_WORDS64 if "WORDS64" in self.defines else "")
            + _HEADER
            + (GLSL_STRUCT if self.takes_step else "")
            + defines
            + "layout(local_size_x_id = 0) in;\n"
            + "".join(
                f"layout(constant_id = {i}) const uint {name} = 1;\n" for i, name in enumerate(self.constants, start=1)
            )
            + f"layout(push_constant, std430) uniform Args {{\n{members}    uint group_base;\n}} args;\n"
            + "uint group_index() { return args.group_base + gl_WorkGroupID.x; }\n"
            + "#line 1\n"
            + self.body
        )

    def specialized(
        self, suffix: str, *, local_size: int = 0, subgroups: int = 0, constants: Mapping[str, int] | None = None
    ) -> Kernel:
        """The same SPIR-V with another size or other constants. suffix: of its name. Raises ValueError for a constant
        that it does not have."""
        if constants and not set(constants) <= set(self.constants):
            raise ValueError(f"kernel {self.name!r} has no constant {', '.join(set(constants) - set(self.constants))}")
        twin = self._twin("in_words")  # which has this one's size
        twin.name = self.name + suffix
        if local_size or subgroups:
            twin.local_size, twin.subgroups = local_size, subgroups
        twin.constants = {**self.constants, **(constants or {})}
        return twin

    def _twin(self, *without: str) -> Kernel:
        """A copy, without some of what was worked out."""
        twin = Kernel.__new__(Kernel)
        twin.__dict__.update(self.__dict__)
        for name in without:
            twin.__dict__.pop(name, None)
        return twin

    @cached_property
    def in_words(self) -> Kernel:
        """The same kernel reading and writing four floats as two 64-bit words (shaders/words.glsl): the same bits.

        Itself where its text has no such places.
        """
        if "WORDS64" in self.defines or not self._printed.has_words:
            return self
        twin = self._twin("glsl", "_printed", "key")
        twin.defines = {**self.defines, "WORDS64": 1}
        return twin

    @property
    def digest(self) -> str:
        """Hash of the text: the key of compiled SPIR-V in the registry and the cache."""
        return self._printed.digest

    @cached_property
    def key(self) -> str:
        """Equal for kernels of equal text, of those that this version prints; "" where the text itself was given."""
        source = self._source
        if isinstance(source, str) and not (_is_file(source) and is_own_shader(source)):
            return ""
        body = source.key if isinstance(source, KernelText) else source
        what = (body, self._args, self.extensions, tuple(self.defines.items()), tuple(self.constants))
        return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()

    @cached_property
    def _printed(self) -> Printed:
        """What is known of the text, where it was printed before: without printing it again."""
        known = known_text(self.key)
        if known is None:
            known = Printed.of(self.glsl)
            if self.key:
                note_text(self.key, known)
        return known

    def check_text(self) -> None:
        """Raises VkfoldError when the text is not what was remembered of it."""
        if Printed.of(self.glsl) != self._printed:
            raise VkfoldError(
                f"kernel {self.name!r}: its text is not the one that was remembered for it. Empty the cache folder "
                "(VKFOLD_CACHE_DIR) and run again"
            )

    def workgroup_size(self, subgroup_size: int, max_invocations: int) -> int:
        """Invocations a workgroup on a device with these limits; of `subgroups`, as many as fit.

        Raises ValueError for a local_size above the limit.
        """
        if self.local_size:
            if self.local_size > max_invocations:
                raise ValueError(
                    f"kernel {self.name!r}: local_size {self.local_size}, the device allows at most {max_invocations} "
                    "invocations a workgroup: give a smaller one (128 fits every device)"
                )
            return self.local_size
        return subgroup_size * max(1, min(self.subgroups, max_invocations // subgroup_size))

    def __repr__(self) -> str:
        return f"Kernel({self.name})"
