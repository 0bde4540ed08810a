"""The validator of SPIRV-Tools, which comes with the compiler, under Vulkan 1.2's rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import cffi
import pytest

from vkfold.engine import glsl_compiler

_DECLARATIONS = """
typedef struct { const uint32_t *code; size_t wordCount; } spv_const_binary_t;
typedef struct { size_t line, column, index; char *error; bool isTextSource; } *spv_diagnostic;
bool spvParseTargetEnv(const char *, int *);
void *spvContextCreate(int);
void *spvValidatorOptionsCreate(void);
void spvValidatorOptionsSetScalarBlockLayout(void *, bool);
int spvValidateWithOptions(void *, void *, const spv_const_binary_t *, spv_diagnostic *);
void spvDiagnosticDestroy(spv_diagnostic);
"""


@cache
def _validator() -> tuple[Any, Any, Any, Any] | None:
    folder = glsl_compiler._library_folder()
    if folder is None:
        return None
    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS)
    tools = ffi.dlopen(str(glsl_compiler._find(folder, "SPIRV-Tools-shared")))
    environment = ffi.new("int *")
    assert tools.spvParseTargetEnv(b"vulkan1.2", environment)
    options = tools.spvValidatorOptionsCreate()
    tools.spvValidatorOptionsSetScalarBlockLayout(options, True)
    return ffi, tools, tools.spvContextCreate(environment[0]), options


def complaint(spirv: bytes) -> str:
    """What is invalid in a module, "" when nothing is. Skips the test where there is no validator."""
    found = _validator()
    if found is None:
        pytest.skip("SPIRV-Tools comes with glslang, which is not installed")
    ffi, tools, context, options = found
    words = ffi.from_buffer("uint32_t[]", spirv)
    binary = ffi.new("spv_const_binary_t *", {"code": words, "wordCount": len(words)})
    diagnostic = ffi.new("spv_diagnostic *")
    if tools.spvValidateWithOptions(context, options, binary, diagnostic) == 0:
        return ""
    text: str = ffi.string(diagnostic[0].error).decode() if diagnostic[0] else "invalid"
    tools.spvDiagnosticDestroy(diagnostic[0])
    return text
