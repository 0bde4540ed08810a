"""PyTorch: on the CPU as the machine's yardstick, and (torchvulkan_peer) on torchvulkan's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import work as works
from numpy_peer import processor
from torch.nn import functional as F
from work import Attention, LmStep, Matmul, MlpStep, Work


class Job:
    """Calls `step`, then waits."""

    def __init__(self, step: Callable[[], None], results: Callable[[], dict[str, Any]], wait: Callable[[], None]):
        self.step, self.read, self.wait = step, results, wait
        wait()

    def run(self) -> None:
        """Once."""
        self.step()
        self.wait()

    def results(self) -> dict[str, np.ndarray]:
        """Whatever the job computes, on the host."""
        return {name: value.detach().cpu().numpy() for name, value in self.read().items()}


def perceptron(work: MlpStep) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Weights [out, in] and biases, and the loss as a function of (parameters, x, labels)."""
    values = [torch.tensor(np.ascontiguousarray(x)) for w, b in work.weights() for x in (w.T, b)]

    def loss(parameters: list[torch.Tensor], x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for i in range(0, len(parameters), 2):
            x = F.linear(x, parameters[i], parameters[i + 1])
            x = x.relu() if i < len(parameters) - 2 else x
        return F.cross_entropy(x, labels)

    return values, loss


def decoder(work: LmStep, device: str) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Weights [out, in], and the loss as a function of (parameters, tokens, targets)."""
    weights = work.weights()
    names = list(weights)
    matrices = {n for n in names if n.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))}
    values = [torch.tensor(np.ascontiguousarray(w.T) if n in matrices else w) for n, w in weights.items()]
    cos, sin = (torch.tensor(table).to(device) for table in work.rope_tables())
    h, kv, dim = work.heads, work.kv_heads, work.head_dim

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [batch, heads, seq, dim]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (work.d_model,), scale, work.norm_eps)

    def loss(parameters: list[torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        p = dict(zip(names, parameters, strict=True))
        x = F.embedding(tokens, p["embedding.weight"])
        b, t = tokens.shape
        for i in range(work.layers):
            y = norm(x, p[f"blocks.{i}.norm1.weight"])
            qkv = F.linear(y, p[f"blocks.{i}.attention.qkv.weight"]).view(b, t, h + 2 * kv, dim).transpose(1, 2)
            q, k, v = rotate(qkv[:, :h]), rotate(qkv[:, h : h + kv]), qkv[:, h + kv :]
            k, v = (x.repeat_interleave(h // kv, 1) for x in (k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(o.transpose(1, 2).reshape(b, t, h * dim), p[f"blocks.{i}.attention.out.weight"])
            y = norm(x, p[f"blocks.{i}.norm2.weight"])
            gate, value = F.linear(y, p[f"blocks.{i}.feed_forward.up.weight"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, p[f"blocks.{i}.feed_forward.down.weight"])
        logits = F.linear(norm(x, p["final_norm.weight"]), p["head"])
        return F.cross_entropy(logits.view(-1, work.vocab), targets.view(-1))

    return values, loss


class Library:
    """See worker.Library."""

    version = torch.__version__

    def __init__(self, torch_device: str = "cpu", name: str = "") -> None:
        self.torch_device = torch_device
        self.device = name or processor()

    def wait(self) -> None:
        """Until the device is done."""

    def prepare(self, work: Work) -> Job:
        """Every work."""
        match work:
            case Matmul():
                return self.matmul(work)
            case Attention():
                return self.attention(work)
            case MlpStep():
                values, loss = perceptron(work)
                x, labels = work.data()
                return self.training(values, loss, (x, labels))
            case _:
                assert isinstance(work, LmStep)
                values, loss = decoder(work, self.torch_device)
                tokens, targets = work.data()
                return self.training(values, loss, (tokens.astype(np.int64), targets.astype(np.int64)))

    def matmul(self, work: Matmul) -> Job:
        """C = op(A) op(B)."""
        a, b = (torch.tensor(x).to(self.torch_device) for x in work.inputs())
        kept: dict[str, torch.Tensor] = {}

        def step() -> None:
            kept["c"] = (a.t() if work.trans_a else a) @ (b.t() if work.trans_b else b)

        return Job(step, lambda: kept, self.wait)

    def attention(self, work: Attention) -> Job:
        """Forward and backward of scaled_dot_product_attention."""
        q, k, v, d_o = (torch.tensor(x).to(self.torch_device) for x in work.inputs())
        kept: dict[str, torch.Tensor] = {}
        for x in (q, k, v):
            x.requires_grad_()

        def step() -> None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradients = torch.autograd.grad(o, (q, k, v), d_o)
            kept.update(zip(("o", "d_q", "d_k", "d_v"), (o, *gradients), strict=True))

        return Job(step, lambda: kept, self.wait)

    def training(self, values: list[torch.Tensor], loss_of: Callable[..., torch.Tensor], data: tuple[Any, ...]) -> Job:
        """AdamW on one batch; the loss comes back to the host every step."""
        parameters = [value.to(self.torch_device).requires_grad_() for value in values]
        inputs = [torch.tensor(x).to(self.torch_device) for x in data]
        optimizer = torch.optim.AdamW(
            parameters, works.LEARNING_RATE, (works.BETA1, works.BETA2), works.EPS, works.WEIGHT_DECAY
        )
        losses: list[float] = []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(parameters, *inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        def results() -> dict[str, torch.Tensor]:
            while len(losses) < works.CHECKED_STEPS:
                step()
            return {"losses": torch.tensor(losses[: works.CHECKED_STEPS], dtype=torch.float64)}

        return Job(step, results, self.wait)
