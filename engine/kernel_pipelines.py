"""The pipelines of a device's kernels: made at first use, or many at once before it.

Making a pipeline takes a driver from some to some hundred milliseconds, even where its own cache has the machine code.
Made one by one while the first step is recorded, they would make that step many times as long as all others; made
together, on all cores, they take a fraction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from . import switches
from .errors import VkfoldError
from .kernel import Kernel
from .kernel_registry import spirv_for, spirv_of_digest
from .pipeline_memory import Recipe
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
        self._threads: list[ThreadPoolExecutor] = []  # that may be making some

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
        """Make those that are not there yet, on all cores; returns them. Left out are those that cannot be made: their
        first use will say why.
        """
        self._wait_for_threads()
        there = {*self._ahead, *self.recipes(self.by_kernel.values())}
        new = [recipe for recipe in recipes if recipe not in there]
        threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
        self._threads.append(threads)
        try:
            list(threads.map(self._make_ahead, new))
        finally:
            threads.shutdown(cancel_futures=True)
            self._threads.remove(threads)
        return {recipe: self._ahead[recipe] for recipe in new if recipe in self._ahead}

    def _make_ahead(self, recipe: Recipe) -> None:
        """In a thread; the pipeline is kept at once, so that an interrupt loses none."""
        spirv = spirv_of_digest(recipe.digest)
        if spirv is None:
            return
        try:
            self._ahead[recipe] = self.device.create_pipeline(
                spirv, recipe.local_size, recipe.push_bytes, recipe.name, recipe.subgroup_size, recipe.constants
            )
        except (VkfoldError, ValueError, OverflowError) as error:  # sizes that no kernel has, from a foreign file
            switches.logger.info("kernel %s: not made ahead: %s", recipe.name, error)

    def _wait_for_threads(self) -> None:
        """An interrupt, and another while the threads of before were waited for, may have left them at work."""
        while self._threads:
            self._threads[-1].shutdown()
            self._threads.pop()

    def destroy(self) -> None:
        """Destroy all of them; no submit in flight may use one."""
        self._wait_for_threads()
        for pipeline in (*self.by_kernel.values(), *self._ahead.values()):
            self.device.destroy_pipeline(pipeline)
        self.by_kernel.clear()
        self._ahead.clear()
