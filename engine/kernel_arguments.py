"""A kernel's arguments: what push constants hold, and in which order."""

from __future__ import annotations

import math
import re
import struct
from functools import lru_cache

# argument type -> (bytes an element, which is the alignment the recorder checks, and the GLSL type)
_POINTERS = {
    "f32": (4, "F32"),
    "f32x4": (16, "F32x4"),
    "u32": (4, "U32"),
    "i32": (4, "I32"),
    "u32x2": (8, "U32x2"),
    "u32x4": (16, "U32x4"),
}
_SCALARS = {"uint": "I", "int": "i", "float": "f"}

# "in f32 x[rows * cols + 1]": sums of products of scalars' names and whole numbers
_EXTENT = re.compile(r"^(\w+)\s*\[([\w\s*+]+)\]$")
_SUM = re.compile(r"^(\d+|[A-Za-z_]\w*)(\s*[*+]\s*(\d+|[A-Za-z_]\w*))*$")


class Argument:
    """One push-constant argument: a pointer to what a tensor holds (with its access) or a scalar.

    extent: for a pointer, how many elements the kernel may touch, where that was declared.
    """

    __slots__ = ("access", "alignment", "extent", "glsl_type", "is_pointer", "letter", "name", "type")

    def __init__(self, text: str) -> None:
        words = text.split(maxsplit=2)
        self.access = self.extent = ""
        if len(words) == 3 and (match := _EXTENT.match(words[2])):
            words[2], self.extent = match.group(1), match.group(2).strip()
        if words == ["step"]:  # the step-parameter buffer: filled in by the recorder
            self.access, self.type, self.name = "step", "step", "step"
        elif (
            len(words) == 3 and words[0] in ("in", "out", "inout") and words[1] in _POINTERS and words[2].isidentifier()
        ):
            self.access, self.type, self.name = words
        elif len(words) == 2 and words[0] in _SCALARS:
            self.type, self.name = words
        else:
            raise ValueError(
                f"argument {text!r}: write 'in|out|inout TYPE NAME' or 'in|out|inout TYPE NAME[COUNT]' with "
                f"TYPE one of {', '.join(_POINTERS)} and COUNT such as n or rows * cols, "
                f"'TYPE NAME' with TYPE one of {', '.join(_SCALARS)}, or 'step'"
            )
        self.is_pointer = bool(self.access)
        if self.type == "step":
            self.alignment, self.glsl_type = 16, "StepParameters"
        elif self.is_pointer:
            self.alignment, self.glsl_type = _POINTERS[self.type]
        else:
            self.alignment, self.glsl_type = 4, self.type
        self.letter = "Q" if self.is_pointer else _SCALARS[self.type]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element behind a pointer."""
        return _POINTERS[self.type][0]

    @property
    def extent_names(self) -> list[str]:
        """The scalars that the extent is made of."""
        return re.findall(r"\b[A-Za-z_]\w*", self.extent) if self.extent else []

    def elements(self, scalars: dict[str, int]) -> int:
        """The extent in numbers, given the values of the scalars."""
        factors = [[word.strip() for word in term.split("*")] for term in self.extent.split("+")]
        return sum(math.prod(int(f) if f.isdigit() else int(scalars[f]) for f in term) for term in factors)


class Arguments:
    """All of a kernel's arguments, from their text (`Kernel`'s args), and how they are packed.

    args: in order. num_pointers: of them; they come first. step_index: place of the step pointer, -1 without one.
    alignment_masks: (argument, mask) of every pointer that needs more than the 4 bytes all tensors have.

    Raises ValueError for malformed arguments, names that repeat, or more than 128 bytes.
    """

    def __init__(self, text: str) -> None:
        self.args = tuple(Argument(part.strip()) for part in text.split(","))
        names = [arg.name for arg in self.args]
        if len(set(names)) != len(names):
            raise ValueError(f"argument names repeat in {text!r}")
        known = {arg.name for arg in self.args if arg.type in ("uint", "int")}
        for arg in self.args:
            unknown = [word for word in arg.extent_names if word not in known]
            if unknown or (arg.extent and not _SUM.match(arg.extent)):
                raise ValueError(
                    f"{arg.name}[{arg.extent}]: a count is made of whole numbers and the names of uint or int "
                    f"arguments ({', '.join(sorted(known)) or 'there are none'}), with * and +"
                )
        flags = [arg.is_pointer for arg in self.args]
        if flags != sorted(flags, reverse=True):
            raise ValueError(f"pointers (and step) come before scalars in {text!r}")
        self.packer = struct.Struct("<" + "".join(arg.letter for arg in self.args) + "I")
        if self.packer.size > 128:
            raise ValueError(f"{self.packer.size} bytes of arguments, Vulkan promises 128: put the rest into a tensor")
        self.num_pointers = sum(flags)
        self.takes_step = "step" in names
        self.step_index = names.index("step") if self.takes_step else -1
        self.alignment_masks = [
            (i, arg.alignment - 1) for i, arg in enumerate(self.args) if arg.is_pointer and arg.alignment > 4
        ]


arguments_of = lru_cache(maxsize=1024)(Arguments)  # many kernels have the same
