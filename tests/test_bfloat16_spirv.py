"""16-bit floats of a module become bfloat16: what changes, what is refused, and what the validator says."""

from __future__ import annotations

import numpy as np
import pytest

from vkfold.engine.glsl_compiler import BFLOAT_PRAGMA, compile_glsl
from vkfold.engine.matmul_variants import MatrixShape, Variant, rounded_variants
from vkfold.engine.ops.matmul_launch import matmul_kernel
from vkfold.engine.spirv import float16_as_bfloat16, instructions, uncontracted

from .spirv_validator import complaint

FLOAT16, BFLOAT16_TYPE, BFLOAT16_MATRIX = 9, 5116, 5118
EXTENSION, CAPABILITY, TYPE_FLOAT, TYPE_MATRIX, MULTIPLY = 10, 17, 22, 4456, 4459
MATRIX_VARIANTS = [(size, v) for size in (32, 64) for v in rounded_variants(size) if v.matrix is not None]
HALVES = """#version 460
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
layout(local_size_x = 1) in;
layout(binding = 0) buffer Words { uint v[]; } words;
shared float16_t kept[2];
void main() {
    kept[0] = unpackFloat2x16(words.v[0]).x;
    barrier();
    EXTRA
    words.v[1] = packFloat2x16(f16vec2(kept[0], kept[1]));
}
"""


def words_of(spirv: bytes, wanted: int) -> list[list[int]]:
    """The operands of all instructions with an opcode."""
    return [words[1:].tolist() for _, opcode, words in instructions(spirv) if opcode == wanted]


def names_of(spirv: bytes) -> set[str]:
    """Of the SPIR-V extensions."""
    return {np.array(w, np.uint32).tobytes().split(b"\0")[0].decode() for w in words_of(spirv, EXTENSION)}


@pytest.mark.parametrize("size,variant", [pytest.param(s, v, id=f"{v.name}_s{s}") for s, v in MATRIX_VARIANTS])
def test_matmul_kernels_have_the_type_that_was_asked_for(size: int, variant: Variant) -> None:
    """Operands bfloat16 in all of the module and no float16 beside them, or the other way round; sums float32."""
    bfloat = variant.precision == "bfloat16"
    assert variant.matrix == MatrixShape(variant.precision, 16, 16, 16)
    for resumes in (False, True):
        kernel = matmul_kernel(variant, size, resumes)
        assert (BFLOAT_PRAGMA in kernel.glsl) == bfloat
        spirv = compile_glsl(kernel.glsl, kernel.name)
        capabilities = {w[0] for w in words_of(spirv, CAPABILITY)}
        assert (FLOAT16 in capabilities) == (not bfloat)
        assert ({BFLOAT16_TYPE, BFLOAT16_MATRIX} <= capabilities) == bfloat
        assert ("SPV_KHR_bfloat16" in names_of(spirv)) == bfloat and "SPV_KHR_cooperative_matrix" in names_of(spirv)
        floats = {w[0]: w[1:] for w in words_of(spirv, TYPE_FLOAT)}
        assert sorted(floats.values()) == ([[16, 0], [32]] if bfloat else [[16], [32]])
        components = sorted(floats[w[1]][0] for w in words_of(spirv, TYPE_MATRIX))
        assert components == [16, 16, 32]
        assert words_of(spirv, MULTIPLY) and not uncontracted(spirv)
        assert not complaint(spirv), kernel


def test_moving_bits_is_all_that_is_valid() -> None:
    """A module that moves 16-bit floats is valid as bfloat16; not one that adds them, or without the capability."""
    bits = compile_glsl(HALVES.replace("EXTRA", "kept[1] = kept[0];"))
    made = float16_as_bfloat16(bits)
    assert not complaint(bits) and not complaint(without_matrices(made))
    assert next(w for w in words_of(made, TYPE_FLOAT) if w[1] == 16)[2:] == [0]
    adding = float16_as_bfloat16(compile_glsl(HALVES.replace("EXTRA", "kept[1] = kept[0] + kept[0];")))
    assert "FAdd doesn't support BFloat16 type" in complaint(without_matrices(adding))
    undeclared = without(without_matrices(made), CAPABILITY, BFLOAT16_TYPE)
    assert "requires one of these capabilities: BFloat16TypeKHR" in complaint(undeclared)


def without(spirv: bytes, opcode: int, operand: int) -> bytes:
    """The module less one instruction."""
    kept = [w for _, op, w in instructions(spirv) if not (op == opcode and w[1] == operand)]
    return np.concatenate([np.frombuffer(spirv, np.uint32)[:5], *kept]).tobytes()


def without_matrices(spirv: bytes) -> bytes:
    """Without the capability that needs cooperative matrices, which these modules have none of."""
    return without(spirv, CAPABILITY, BFLOAT16_MATRIX)


def test_a_constant_would_change_its_value() -> None:
    """1.0 as float16 is other bits than as bfloat16: such text is refused when it is compiled."""
    text = HALVES.replace("EXTRA", "kept[1] = float16_t(1.0);")
    compile_glsl(text)
    with pytest.raises(ValueError, match="has a float16 constant"):
        compile_glsl(text.replace("layout(local", BFLOAT_PRAGMA + "layout(local"))


def test_a_module_without_16_bit_floats_declares_the_type_and_no_more() -> None:
    """Nothing in it is taken for one: 32-bit floats and integers stay."""
    spirv = compile_glsl("#version 460\nlayout(local_size_x = 1) in; void main() { float x = 2.0; }")
    made = float16_as_bfloat16(spirv)
    assert words_of(made, TYPE_FLOAT) == words_of(spirv, TYPE_FLOAT)
    assert words_of(made, CAPABILITY) == words_of(spirv, CAPABILITY) and not complaint(made)
