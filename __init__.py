"""vkfold: train and run transformers from Python on any Vulkan GPU."""

from __future__ import annotations

from typing import Any

from . import nn
from .engine import expr
from .engine.compute_engine import ComputeEngine
from .engine.cpu_engine import CpuEngine
from .engine.errors import VkfoldError
from .engine.expr_derivative import derivative, pullback
from .engine.kernel import Kernel
from .engine.plan_engine import PlanEngine
from .engine.tensor import Tensor, TensorSpec
from .engine.vulkan_engine import VulkanEngine
from .nn.state_files import load, save

__version__ = "0.1.0"

_default: ComputeEngine | None = None


def default_engine() -> ComputeEngine:
    """The engine `tensor` uses: a VulkanEngine on the best device, made at first use."""
    global _default
    if _default is None or _default.closed:
        _default = VulkanEngine()
    return _default


def set_default_engine(engine: ComputeEngine | None) -> None:
    """Choose the engine `tensor` uses; None goes back to making one."""
    global _default
    _default = engine


def tensor(values: Any, dtype: str | None = None) -> Tensor:
    """A tensor on the default engine: float64 becomes float32, integers int32."""
    return default_engine().tensor(values, dtype)


def zeros(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    """A tensor of zeros on the default engine."""
    return default_engine().zeros(shape, dtype)


__all__ = [
    "ComputeEngine",
    "CpuEngine",
    "Kernel",
    "PlanEngine",
    "Tensor",
    "TensorSpec",
    "VkfoldError",
    "VulkanEngine",
    "default_engine",
    "derivative",
    "expr",
    "load",
    "nn",
    "pullback",
    "save",
    "set_default_engine",
    "tensor",
    "zeros",
]
