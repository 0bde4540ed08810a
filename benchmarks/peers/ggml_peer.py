"""ggml's Vulkan backend, called through ctypes in the shared libraries of the cyllama-vulkan wheel."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import work as works
from work import Matmul, MlpStep, Unsupported, Work

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
        (base, "ggml_add", pointer, (pointer, pointer, pointer)),
        (base, "ggml_mul", pointer, (pointer, pointer, pointer)),
        (base, "ggml_relu", pointer, (pointer, pointer)),
        (base, "ggml_step", pointer, (pointer, pointer)),
        (base, "ggml_transpose", pointer, (pointer, pointer)),
        (base, "ggml_cont", pointer, (pointer, pointer)),
        (base, "ggml_repeat_back", pointer, (pointer, pointer, pointer)),
        (base, "ggml_cross_entropy_loss", pointer, (pointer, pointer, pointer)),
        (base, "ggml_cross_entropy_loss_back", pointer, (pointer, pointer, pointer, pointer)),
        (base, "ggml_opt_step_adamw", pointer, (pointer,) * 6),
        (base, "ggml_set_param", None, (pointer,)),
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


class Graph:
    """Tensors, and one graph over them. ggml's order of sizes: the fast axis first."""

    def __init__(self, base: ctypes.CDLL, backend: Any) -> None:
        self.base, self.backend = base, backend
        self.context = base.ggml_init(_InitParams(1 << 22, None, True))
        self.graph = base.ggml_new_graph(self.context)
        self.values: list[tuple[Any, np.ndarray]] = []

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.base.ggml_backend_buffer_free(self.buffer)
        self.base.ggml_free(self.context)

    def tensor(self, values: np.ndarray) -> Any:
        """A resident tensor of a float32 array of one or two dimensions."""
        made = self.base.ggml_new_tensor_2d(self.context, _F32, values.shape[-1], values.size // values.shape[-1])
        self.values.append((made, np.ascontiguousarray(values, np.float32)))
        return made

    def op(self, name: str, *inputs: Any) -> Any:
        """The result of ggml_NAME(context, inputs...)."""
        return getattr(self.base, f"ggml_{name}")(self.context, *inputs)

    def compute_also(self, tensor: Any) -> None:
        """Add a result, and what it needs, to the end of the graph."""
        self.base.ggml_build_forward_expand(self.graph, tensor)

    def ready(self) -> None:
        """Allocate everything and upload the values."""
        self.buffer = self.base.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        for tensor, values in self.values:
            self.upload(tensor, values)

    def upload(self, tensor: Any, values: np.ndarray) -> None:
        """Overwrite a tensor."""
        self.base.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def download(self, tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Values of a tensor."""
        values = np.empty(shape, np.float32)
        self.base.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return values

    def compute(self) -> None:
        """The whole graph, to its end."""
        if self.base.ggml_backend_graph_compute(self.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")
        self.base.ggml_backend_synchronize(self.backend)


class MatmulJob:
    """mul_mat(B^T, A): both operands have k as their fast axis, the only form ggml has."""

    def __init__(self, graph: Graph, work: Matmul) -> None:
        if work.trans_a:
            raise Unsupported("mul_mat takes no operand that is stored [k, m]")
        a, b = work.inputs()
        self.graph, self.shape = graph, (work.m, work.n)
        self.c = graph.op("mul_mat", graph.tensor(b if work.trans_b else b.T), graph.tensor(a))
        graph.compute_also(self.c)
        graph.ready()

    def run(self) -> None:
        """Once."""
        self.graph.compute()

    def results(self) -> dict[str, np.ndarray]:
        """c [m, n]."""
        return {"c": self.graph.download(self.c, self.shape)}


class PerceptronJob:
    """Training steps. ggml's own backward makes products that its Vulkan backend does not have, so the backward is
    written out here, with mul_mat; everything of a step is one graph on the device."""

    def __init__(self, graph: Graph, work: MlpStep) -> None:
        self.graph = graph
        x, labels = work.data()
        one_hot = graph.tensor(np.eye(work.sizes[-1], dtype=np.float32)[labels])
        weights = [tuple(graph.tensor(value) for value in (w.T, b)) for w, b in work.weights()]
        inputs = [graph.tensor(x)]
        for i, (w, b) in enumerate(weights):
            y = graph.op("add", graph.op("mul_mat", w, inputs[-1]), b)
            inputs.append(graph.op("relu", y) if i < len(weights) - 1 else y)
        logits = inputs.pop()
        self.loss = graph.op("cross_entropy_loss", logits, one_hot)
        graph.compute_also(self.loss)
        one = graph.tensor(np.ones(1, np.float32))
        updates = self._gradients(weights, inputs, graph.op("cross_entropy_loss_back", one, logits, one_hot))
        self.settings = graph.tensor(np.zeros(7, np.float32))
        shapes = [(w.T.shape, b.shape) for w, b in work.weights()]
        for (tensor, gradient), shape in zip(updates, [s for pair in shapes for s in pair], strict=True):
            graph.base.ggml_set_param(tensor)
            moments = [graph.tensor(np.zeros(shape, np.float32)) for _ in range(2)]
            graph.compute_also(graph.op("opt_step_adamw", tensor, gradient, *moments, self.settings))
        graph.ready()
        self.losses: list[float] = []

    def _gradients(self, weights: list[tuple[Any, ...]], inputs: list[Any], d: Any) -> list[tuple[Any, Any]]:
        """(tensor, its gradient) of all layers, all made before the first update. d: of the logits."""
        graph = self.graph

        def flipped(tensor: Any) -> Any:
            return graph.op("cont", graph.op("transpose", tensor))

        found: list[tuple[Any, Any]] = []
        for i in range(len(weights) - 1, -1, -1):
            w, b = weights[i]
            d_w = graph.op("mul_mat", flipped(inputs[i]), flipped(d))
            found[:0] = [(w, d_w), (b, graph.op("repeat_back", d, b))]
            if i:
                d = graph.op("mul", graph.op("mul_mat", flipped(w), d), graph.op("step", inputs[i]))
        for _, gradient in found:
            graph.compute_also(gradient)
        return found

    def run(self) -> None:
        """One step; its loss comes back to the host."""
        step = len(self.losses) + 1
        corrections = (1 / (1 - works.BETA1**step), 1 / (1 - works.BETA2**step))
        settings = (works.LEARNING_RATE, works.BETA1, works.BETA2, works.EPS, works.WEIGHT_DECAY, *corrections)
        self.graph.upload(self.settings, np.array(settings, np.float32))
        self.graph.compute()
        self.losses.append(float(self.graph.download(self.loss, (1,))[0]))

    def results(self) -> dict[str, np.ndarray]:
        """Losses of the first steps."""
        while len(self.losses) < works.CHECKED_STEPS:
            self.run()
        return {"losses": np.array(self.losses[: works.CHECKED_STEPS])}


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

    def prepare(self, work: Work) -> MatmulJob | PerceptronJob:
        """Matmul and the perceptron."""
        if isinstance(work, Matmul):
            return MatmulJob(Graph(self.base, self.backend), work)
        if isinstance(work, MlpStep):
            return PerceptronJob(Graph(self.base, self.backend), work)
        raise Unsupported("its Vulkan backend has no backward of attention")
