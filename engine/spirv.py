"""Passes over SPIR-V words. Float arithmetic must not be contracted, and NaN, infinities and zeros are kept, so that
bits do not depend on a driver's taste. 16-bit floats may become bfloat16, which the compiler's GLSL does not have.

Format: SPIR-V specification, section 2.3 (physical layout): five header words, then instructions whose first word is
(length << 16) | opcode.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_MAGIC = 0x07230203
_HEADER_WORDS = 5
_OP_DECORATE = 71
_OP_ENTRY_POINT, _OP_EXECUTION_MODE = 15, 16
_OP_EXTENSION, _OP_CAPABILITY, _OP_TYPE_FLOAT, _OP_CONSTANT, _OP_SPEC_CONSTANT = 10, 17, 22, 43, 50
_NO_CONTRACTION = 42
# SPIR-V 1.6, 3.52.13 (arithmetic): result id in word 2
_FLOAT_OPS = {
    127: "FNegate",
    129: "FAdd",
    131: "FSub",
    133: "FMul",
    136: "FDiv",
    140: "FRem",
    141: "FMod",
    142: "VectorTimesScalar",
    143: "MatrixTimesScalar",
    144: "VectorTimesMatrix",
    145: "MatrixTimesVector",
    146: "MatrixTimesMatrix",
    147: "OuterProduct",
    148: "Dot",
}
# SignedZeroInfNanPreserve, a capability and an execution mode of SPIR-V 1.4
_SPECIAL_VALUES, _SPECIAL_VALUES_MODE = 4466, 4461
# SPV_KHR_bfloat16, revision 1; the encoding is a third operand of OpTypeFloat
_FLOAT16, _BFLOAT16_TYPE, _BFLOAT16_MATRIX, _BFLOAT16_ENCODING = 9, 5116, 5118, 0
_BFLOAT16_EXTENSION = "SPV_KHR_bfloat16"
_ANNOTATIONS_END = range(19, 40)  # the type declarations, which follow all annotations


def _words(spirv: bytes) -> np.ndarray:
    words = np.frombuffer(spirv, np.uint32)
    if len(words) < _HEADER_WORDS or words[0] != _MAGIC:
        raise ValueError("not a SPIR-V module of this machine's byte order")
    return words


def instructions(spirv: bytes) -> Iterator[tuple[int, int, np.ndarray]]:
    """(position in words, opcode, words) of each instruction. Raises ValueError for a malformed module."""
    words = _words(spirv)
    position = _HEADER_WORDS
    while position < len(words):
        length, opcode = int(words[position]) >> 16, int(words[position]) & 0xFFFF
        if length == 0 or position + length > len(words):
            raise ValueError(f"malformed SPIR-V at word {position}")
        yield position, opcode, words[position : position + length]
        position += length


def uncontracted(spirv: bytes) -> list[tuple[int, str]]:
    """(result id, operation) of every float operation that a driver may still contract."""
    decorated, operations = set(), []
    for _, opcode, words in instructions(spirv):
        if opcode == _OP_DECORATE and words[2] == _NO_CONTRACTION:
            decorated.add(int(words[1]))
        elif opcode in _FLOAT_OPS:
            operations.append((int(words[2]), _FLOAT_OPS[opcode]))
    return [(result, name) for result, name in operations if result not in decorated]


def add_no_contraction(spirv: bytes) -> bytes:
    """The module with NoContraction on every float operation."""
    missing = uncontracted(spirv)
    if not missing:
        return spirv
    # Annotations come before the first type declaration (specification, section 2.4).
    place = next(position for position, opcode, _ in instructions(spirv) if opcode in _ANNOTATIONS_END)
    decorations = [word for result, _ in missing for word in ((3 << 16) | _OP_DECORATE, result, _NO_CONTRACTION)]
    words = _words(spirv)
    return np.concatenate([words[:place], np.array(decorations, np.uint32), words[place:]]).tobytes()


def preserve_special_values(spirv: bytes) -> bytes:
    """The module with zeros of both signs, infinities and NaN of float32 kept as IEEE 754 has them.

    Without this execution mode a driver may compute as if there were none (Vulkan specification, appendix "Vulkan
    Environment for SPIR-V"): Mesa 26 makes x - x zero. For devices with shaderSignedZeroInfNanPreserveFloat32. Only the
    first instructions are gone through, since it is done for each pipeline.
    """
    words = _words(spirv)
    capability: int | None = None
    for position, opcode, each in instructions(spirv):
        if opcode != _OP_CAPABILITY and capability is None:
            capability = position
        if opcode == _OP_ENTRY_POINT:
            after = position + len(each)
            mode = [4 << 16 | _OP_EXECUTION_MODE, int(each[2]), _SPECIAL_VALUES_MODE, 32]
            declared = [2 << 16 | _OP_CAPABILITY, _SPECIAL_VALUES]
            parts = words[:capability], declared, words[capability:after], mode, words[after:]
            return np.concatenate([np.asarray(part, np.uint32) for part in parts]).tobytes()
    raise ValueError("a SPIR-V module without an entry point")


def _extension(name: str) -> list[int]:
    raw = name.encode() + b"\0"
    words = np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4, b"\0"), np.uint32).tolist()
    return [(1 + len(words)) << 16 | _OP_EXTENSION, *words]


def float16_as_bfloat16(spirv: bytes) -> bytes:
    """The module with every 16-bit float type a bfloat16, for cooperative matrices of them (SPV_KHR_bfloat16).

    Right for modules that move such values (load, store, bitcast, extract, multiply matrices): the extension allows no
    arithmetic on them. Conversions keep their meaning as well, but round as the device likes: the bits of an operand
    should be made by integers. Raises ValueError for a constant of the type, whose bits are float16's.
    """
    made: list[int] = _words(spirv)[:_HEADER_WORDS].tolist()
    types: set[int] = set()
    declared = False
    for _, opcode, words in instructions(spirv):
        kept: list[int] = words.tolist()
        if opcode == _OP_CAPABILITY and kept[1] == _FLOAT16:
            kept = [word for new in (_BFLOAT16_TYPE, _BFLOAT16_MATRIX) for word in (2 << 16 | _OP_CAPABILITY, new)]
        elif opcode != _OP_CAPABILITY and not declared:  # extensions follow capabilities (specification, section 2.4)
            kept, declared = [*_extension(_BFLOAT16_EXTENSION), *kept], True
        elif opcode == _OP_TYPE_FLOAT and kept[2] == 16:
            types.add(kept[1])
            kept = [4 << 16 | _OP_TYPE_FLOAT, *kept[1:3], _BFLOAT16_ENCODING]
        elif opcode in (_OP_CONSTANT, _OP_SPEC_CONSTANT) and kept[1] in types:
            raise ValueError(
                f"SPIR-V to be made bfloat16 has a float16 constant, %{kept[2]}: make its bits of integers"
            )
        made += kept
    return np.array(made, np.uint32).tobytes()
