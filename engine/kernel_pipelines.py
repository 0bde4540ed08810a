"""The pipelines of a device's kernels: made at first use, or many at once before it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from . import switches
from .kernel import Kernel
from .kernel_registry import spirv_for
from .pipeline_memory import Recipe, make_pipelines
from .vulkan_api import Device, Pipeline


class KernelPipelines:
    """One pipeline a kernel. by_kernel: those that were asked for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # lavapipe goes through the lanes of an access one by one: fewer and longer ones pay there.
        self.in_words = device.driver_name == "llvmpipe" and "shaderInt64" in device.physical.features
        self._checks_texts = bool(switches.get("VKFOLD_DEBUG"))
        self.by_kernel: dict[Kernel, Pipeline] = {}
        self._ahead: dict[Recipe, Pipeline] = {}
        self._makers: list[ThreadPoolExecutor] = []  # that may be making pipelines

    def text_of(self, kernel: Kernel) -> Kernel:
        """The kernel, or its twin that this driver is given."""
        return kernel.in_words if self.in_words else kernel

    def _recipe(self, kernel: Kernel) -> Recipe:
        return Recipe.of(self.text_of(kernel), self.device.subgroup_size, self.device.max_workgroup_invocations)

    def make(self, kernel: Kernel) -> Pipeline:
        """The pipeline of a kernel that was not asked for yet."""
        if self._checks_texts:
            self.text_of(kernel).check_text()
        recipe = self._recipe(kernel)
        found = self._ahead.get(recipe)
        if found is None:
            spirv = spirv_for(self.text_of(kernel))
            found = self.device.create_pipeline(spirv, *recipe[2:4], kernel.name, *recipe[4:])
        self.by_kernel[kernel] = found
        self._ahead.pop(recipe, None)  # last: an interrupt leaves it in one place at least
        return found

    def compile(self, kernel: Kernel) -> None:
        """See to it that `make` will have SPIR-V. Raises what it would raise for a kernel that cannot be made."""
        if self._recipe(kernel) not in self._ahead:
            spirv_for(self.text_of(kernel))

    def recipes(self, used: Iterable[Pipeline]) -> list[Recipe]:
        """How to make these pipelines again."""
        wanted = set(map(id, used))
        return [self._recipe(kernel) for kernel, pipeline in self.by_kernel.items() if id(pipeline) in wanted]

    def make_ahead(self, recipes: Iterable[Recipe]) -> dict[Recipe, Pipeline]:
        """Make those that are not there yet, all at once; returns them."""
        self._wait_for_makers()
        there = {*self._ahead, *self.recipes(self.by_kernel.values())}
        new = [recipe for recipe in recipes if recipe not in there]
        make_pipelines(self.device, new, self._ahead, self._makers)
        return {recipe: self._ahead[recipe] for recipe in new if recipe in self._ahead}

    def _wait_for_makers(self) -> None:
        """An interrupt may have left them at work."""
        while self._makers:
            self._makers[-1].shutdown()
            self._makers.pop()

    def destroy(self) -> None:
        """Destroy all of them; no submit in flight may use one."""
        self._wait_for_makers()
        for pipeline in (*self.by_kernel.values(), *self._ahead.values()):
            self.device.destroy_pipeline(pipeline)
        self.by_kernel.clear()
        self._ahead.clear()
