"""What the second run of a program saves: kernels compiled, pipelines made in the first step, and how long that takes.

The same training program runs twice in processes of their own, with caches that are empty before the first. Times of
steps are wall-clock and, because other work on the machine leaves that alone, processor time of the whole process.

Run: python benchmarks/second_run.py [--d-model 128] [--layers 2] [--json]
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
    from vkfold.engine import kernel_registry

    compiled: list[str] = []
    plain = kernel_registry.compile_glsl

    def counted(text: str, name: str = "") -> bytes:
        compiled.append(name)
        return plain(text, name)

    kernel_registry.compile_glsl = counted
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
    parser.add_argument("--json", action="store_true", help="one JSON list of the two runs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="vkfold-second-run-") as folder:
        environment = {
            **os.environ,
            "VKFOLD_CACHE_DIR": os.path.join(folder, "vkfold"),
            "MESA_SHADER_CACHE_DIR": os.path.join(folder, "mesa"),
        }
        for _ in range(2):
            command = [sys.executable, __file__, "--child", *(word for word in sys.argv[1:] if word != "--json")]
            told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            rows.append(json.loads(told.stdout))
    if options.json:
        print(json.dumps(rows))
        return
    for name in rows[0]:
        print(f"{name:34s} {rows[0][name]!s:>40} {rows[1][name]!s:>40}")
    print(f"goal: no kernel compiled, no pipeline made in the first step, a ratio of at most {GOAL} in the second run")


if __name__ == "__main__":
    main()
