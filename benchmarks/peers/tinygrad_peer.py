"""tinygrad on its WEBGPU device: Dawn, which runs on Vulkan."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import work as works
from work import Attention, LmStep, Matmul, MlpStep, Work

_SUFFIX = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
_DAWN = sorted((Path(sysconfig.get_paths()["purelib"]) / "pydawn" / "lib").glob(f"libwebgpu_dawn*.{_SUFFIX}"))
os.environ.setdefault("DEV", "WEBGPU")
os.environ.setdefault("WEBGPU", "1")
if _DAWN and "WEBGPU_PATH" not in os.environ:
    os.environ["WEBGPU_PATH"] = str(next((p for p in _DAWN if platform.machine() in p.name), _DAWN[0]))

from tinygrad import Context, Device, Tensor, TinyJit  # noqa: E402 - reads the environment when imported
from tinygrad.nn.optim import AdamW  # noqa: E402


class Job:
    """Calls a captured step (TinyJit: recorded in the first calls, replayed from then on), then waits."""

    def __init__(self, step: Callable[[], Any], keep: Callable[[Any], None], results: Callable[[], dict[str, Any]]):
        self.step, self.keep, self.results = TinyJit(step), keep, results

    def run(self) -> None:
        """Once."""
        self.keep(self.step())
        Device[Device.DEFAULT].synchronize()


def trained(parameters: list[Tensor], loss_of: Callable[[], Tensor]) -> Job:
    """AdamW on one batch; the loss comes back to the host every step."""
    optimizer = AdamW(
        parameters, works.LEARNING_RATE, works.BETA1, works.BETA2, works.EPS, weight_decay=works.WEIGHT_DECAY
    )
    losses: list[float] = []

    def step() -> Tensor:
        with Context(TRAINING=1):
            optimizer.zero_grad()
            loss = loss_of().backward()
            return loss.realize(*optimizer.schedule_step())

    def keep(loss: Tensor) -> None:
        losses.append(float(loss.item()))

    def results() -> dict[str, np.ndarray]:
        while len(losses) < works.CHECKED_STEPS:
            job.run()
        return {"losses": np.array(losses[: works.CHECKED_STEPS])}

    job = Job(step, keep, results)
    return job


def parameter(value: np.ndarray) -> Tensor:
    """A trainable tensor on the device."""
    tensor = Tensor(value).realize()
    tensor.requires_grad = True
    return tensor


class Library:
    """See worker.Library."""

    def __init__(self) -> None:
        self.version = version("tinygrad")
        Tensor([1.0]).realize()
        self.device = f"{Device.DEFAULT} (Dawn)"

    def prepare(self, work: Work) -> Job:
        """Every work."""
        match work:
            case Matmul():
                return self.matmul(work)
            case MlpStep():
                return self.perceptron(work)
            case LmStep():
                return self.decoder(work)
            case _:
                assert isinstance(work, Attention)
                return self.attention(work)

    def matmul(self, work: Matmul) -> Job:
        """C = op(A) op(B)."""
        a, b = (Tensor(x).realize() for x in work.inputs())
        kept: dict[str, Tensor] = {}

        def step() -> Tensor:
            return ((a.T if work.trans_a else a) @ (b.T if work.trans_b else b)).realize()

        return Job(step, lambda c: kept.update(c=c), lambda: {"c": kept["c"].numpy()})

    def attention(self, work: Attention) -> Job:
        """Forward and backward; it makes the score matrix."""
        q, k, v, d_o = (Tensor(x).realize() for x in work.inputs())
        kept: dict[str, Tensor] = {}

        def step() -> tuple[Tensor, ...]:
            o = q.scaled_dot_product_attention(k, v, is_causal=True)
            results = (o, *(o * d_o).sum().gradient(q, k, v))
            Tensor.realize(*results)
            return results

        def keep(results: tuple[Tensor, ...]) -> None:
            kept.update(zip(("o", "d_q", "d_k", "d_v"), results, strict=True))

        return Job(step, keep, lambda: {name: tensor.numpy() for name, tensor in kept.items()})

    def perceptron(self, work: MlpStep) -> Job:
        """Training steps."""
        parameters = [parameter(value) for pair in work.weights() for value in pair]
        x, labels = work.data()
        data, targets = Tensor(x).realize(), Tensor(labels.astype(np.int32)).realize()

        def loss() -> Tensor:
            y = data
            for i in range(0, len(parameters), 2):
                y = y @ parameters[i] + parameters[i + 1]
                y = y.relu() if i < len(parameters) - 2 else y
            return y.sparse_categorical_crossentropy(targets)

        return trained(parameters, loss)

    def decoder(self, work: LmStep) -> Job:
        """Training steps."""
        p = {name: parameter(value) for name, value in work.weights().items()}
        tokens, targets = (Tensor(value).realize() for value in work.data())
        cos, sin = (Tensor(table).realize() for table in work.rope_tables())
        h, kv, dim, b, t = work.heads, work.kv_heads, work.head_dim, work.batch, work.seq

        def rotate(x: Tensor) -> Tensor:
            first, second = x[..., : dim // 2], x[..., dim // 2 :]
            return (first * cos - second * sin).cat(second * cos + first * sin, dim=-1)

        def norm(x: Tensor, scale: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + work.norm_eps).rsqrt() * scale

        def loss() -> Tensor:
            x = p["embedding.weight"][tokens]
            for i in range(work.layers):
                y = norm(x, p[f"blocks.{i}.norm1.weight"])
                qkv = (y @ p[f"blocks.{i}.attention.qkv.weight"]).reshape(b, t, h + 2 * kv, dim).transpose(1, 2)
                q, k, v = rotate(qkv[:, :h]), rotate(qkv[:, h : h + kv]), qkv[:, h + kv :]
                k, v = (x.repeat_interleave(h // kv, dim=1) for x in (k, v))
                o = q.scaled_dot_product_attention(k, v, is_causal=True)
                x = x + o.transpose(1, 2).reshape(b, t, h * dim) @ p[f"blocks.{i}.attention.out.weight"]
                y = norm(x, p[f"blocks.{i}.norm2.weight"]) @ p[f"blocks.{i}.feed_forward.up.weight"]
                hidden = y[..., : work.d_ff].silu() * y[..., work.d_ff :]
                x = x + hidden @ p[f"blocks.{i}.feed_forward.down.weight"]
            logits = norm(x, p["final_norm.weight"]) @ p["head"].T
            return logits.reshape(-1, work.vocab).sparse_categorical_crossentropy(targets.reshape(-1))

        return trained(list(p.values()), loss)
