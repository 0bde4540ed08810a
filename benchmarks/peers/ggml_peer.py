"""ggml's Vulkan backend, called through ctypes in the shared libraries of the cyllama-vulkan wheel."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from work import Matmul, Unsupported, Work

os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # or it passes over software devices
_F32 = 0  # GGML_TYPE_F32


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """(ggml-base, ggml-vulkan) with the types of what is called. Raises OSError where the wheel holds none."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "cyllama_vulkan.libs"
    found = {part: sorted(folder.glob(f"libggml-{part}-*.so*")) for part in ("base", "vulkan")}
    if not all(found.values()):
        raise OSError(f"no libggml-base and libggml-vulkan in {folder.name}")
    base, vulkan = (ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL) for paths in found.values())
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for library, name, result, arguments in (
        (base, "ggml_version", ctypes.c_char_p, ()),
        (base, "ggml_init", pointer, (_InitParams,)),
        (base, "ggml_free", None, (pointer,)),
        (base, "ggml_new_tensor_2d", pointer, (pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
        (base, "ggml_mul_mat", pointer, (pointer, pointer, pointer)),
        (base, "ggml_new_graph", pointer, (pointer,)),
        (base, "ggml_build_forward_expand", None, (pointer, pointer)),
        (base, "ggml_backend_alloc_ctx_tensors", pointer, (pointer, pointer)),
        (base, "ggml_backend_buffer_free", None, (pointer,)),
        (base, "ggml_backend_tensor_set", None, (pointer, pointer, size, size)),
        (base, "ggml_backend_tensor_get", None, (pointer, pointer, size, size)),
        (base, "ggml_backend_graph_compute", ctypes.c_int, (pointer, pointer)),
        (base, "ggml_backend_synchronize", None, (pointer,)),
        (vulkan, "ggml_backend_vk_init", pointer, (size,)),
        (vulkan, "ggml_backend_vk_get_device_count", ctypes.c_int, ()),
        (vulkan, "ggml_backend_vk_get_device_description", None, (ctypes.c_int, ctypes.c_char_p, size)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, vulkan


class MatmulJob:
    """mul_mat(B^T, A): both operands have k as their fast axis, the only form ggml has."""

    def __init__(self, base: ctypes.CDLL, backend: Any, work: Matmul) -> None:
        if work.trans_a:
            raise Unsupported("mul_mat takes no operand that is stored [k, m]")
        self.base, self.backend = base, backend
        a, b = work.inputs()
        b = np.ascontiguousarray(b if work.trans_b else b.T)
        self.shape = (work.m, work.n)
        self.context = base.ggml_init(_InitParams(1 << 20, None, True))
        left = base.ggml_new_tensor_2d(self.context, _F32, work.k, work.n)
        right = base.ggml_new_tensor_2d(self.context, _F32, work.k, work.m)
        self.c = base.ggml_mul_mat(self.context, left, right)
        self.graph = base.ggml_new_graph(self.context)
        base.ggml_build_forward_expand(self.graph, self.c)
        self.buffer = base.ggml_backend_alloc_ctx_tensors(self.context, backend)
        for tensor, values in ((left, b), (right, a)):
            base.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.base.ggml_backend_buffer_free(self.buffer)
            self.base.ggml_free(self.context)

    def run(self) -> None:
        """Once."""
        if self.base.ggml_backend_graph_compute(self.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")
        self.base.ggml_backend_synchronize(self.backend)

    def results(self) -> dict[str, np.ndarray]:
        """c [m, n]."""
        c = np.empty(self.shape, np.float32)
        self.base.ggml_backend_tensor_get(self.c, c.ctypes.data, 0, c.nbytes)
        return {"c": c}


class Library:
    """See worker.Library."""

    def __init__(self) -> None:
        self.base, vulkan = load()
        self.version = f"{self.base.ggml_version().decode()} (cyllama-vulkan {version('cyllama-vulkan')})"
        if not vulkan.ggml_backend_vk_get_device_count():
            raise RuntimeError("ggml finds no Vulkan device")
        text = ctypes.create_string_buffer(256)
        vulkan.ggml_backend_vk_get_device_description(0, text, len(text))
        self.device = text.value.decode()
        self.backend = vulkan.ggml_backend_vk_init(0)

    def prepare(self, work: Work) -> MatmulJob:
        """Matmul only."""
        if isinstance(work, Matmul):
            return MatmulJob(self.base, self.backend, work)
        raise Unsupported("only matmul is called here")
