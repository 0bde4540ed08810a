"""What the second run of a program saves: kernels compiled and printed, pipelines made in the first step, and how long
that takes.

The same training program runs in processes of their own, with caches that are empty before the first: once, and then
--runs times, of which medians are told. Times of steps are wall-clock and, because other work on the machine leaves
that alone, processor time of the whole process.

Run: python benchmarks/second_run.py [--d-model 128] [--layers 2] [--runs 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

GOAL = 1.5  # first step by steady step, second run


def child(options: argparse.Namespace) -> None:
    """One run: prints one JSON object."""
    started = time.perf_counter()
    import numpy as np

    import vkfold as vf
    from vkfold.engine import kernel, kernel_registry

    compiled: list[str] = []
    printed: list[str] = []
    plain, body = kernel_registry.compile_glsl, kernel.Kernel.body.fget  # type: ignore[attr-defined]

    def counted(text: str, name: str = "") -> bytes:
        compiled.append(name)
        return plain(text, name)

    def counted_body(self: kernel.Kernel) -> str:
        printed.append(self.name)
        return str(body(self))

    kernel_registry.compile_glsl = counted
    kernel.Kernel.body = property(counted_body)  # type: ignore[method-assign, assignment]
    vocab, seq, batch = 256, options.seq_len, 4
    config = vf.nn.GPTConfig(vocab, seq, options.d_model, num_heads=4, num_layers=options.layers, num_kv_heads=2)
    tokens = np.random.default_rng(0).integers(0, vocab, (2, batch, seq))
    with vf.VulkanEngine() as engine:
        model = vf.nn.GPTModel(engine, config)
        step = vf.nn.TrainingStep(model, vf.nn.AdamW(model), max_norm=1.0)
        made_before = engine.device.num_pipelines_made
        ready = time.perf_counter() - started
        wall, cpu = [], []
        for number in range(8):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            step([(tokens[0], tokens[1])], step=number, learning_rate=1e-3)
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.process_time() - cpu_start)
            if number == 0:
                made = engine.device.num_pipelines_made - made_before
        driver = engine.name
    row = {
        "driver": driver,
        "kernels_compiled": len(compiled),
        "texts_printed": len(printed),
        "pipelines_made_before_first_step": made_before,
        "pipelines_made_in_first_step": made,
        "ready_s": ready,
        "first_step_s": wall[0],
        "steady_step_s": statistics.median(wall[2:]),
        "ratio_wall": wall[0] / statistics.median(wall[2:]),
        "ratio_cpu": cpu[0] / statistics.median(cpu[2:]),
    }
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))


def main() -> None:
    """Parse the command line, run the program twice, print what each run did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5, help="after the first one")
    parser.add_argument("--json", action="store_true", help="one JSON list: the first run, medians of the others")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least one run comes after the first")
    rows = []
    with tempfile.TemporaryDirectory(prefix="vkfold-second-run-") as folder:
        environment = {
            **os.environ,
            "VKFOLD_CACHE_DIR": os.path.join(folder, "vkfold"),
            "MESA_SHADER_CACHE_DIR": os.path.join(folder, "mesa"),
        }
        for _ in range(1 + options.runs):
            command = [sys.executable, __file__, "--child", *(word for word in sys.argv[1:] if word != "--json")]
            told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            rows.append(json.loads(told.stdout))
    first, *others = rows
    for name, value in others[0].items():
        if not isinstance(value, str):
            others[0][name] = round(statistics.median(row[name] for row in others), 3)
    rows = [first, others[0]]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'':34s} {'first run':>40} {f'median of {options.runs} more':>40}")
    for name in rows[0]:
        print(f"{name:34s} {rows[0][name]!s:>40} {rows[1][name]!s:>40}")
    print(f"goal: no kernel compiled, no pipeline made in the first step, a ratio of at most {GOAL} in the second run")


if __name__ == "__main__":
    main()
