"""The works that libraries are compared on: names, inputs, float64 results. Needs nothing but NumPy, so that every
library's own environment can import it.

    matmul 512                     float32 [512, 512] @ [512, 512]
    matmul 1752x4720x584           [1752, 4720] @ [4720, 584]: m x k x n
    matmul 512 NT, matmul 512 TN   the second (first) operand is stored transposed
    attention 1x4x512x64 f+b       batch x heads x positions x head_dim, causal, forward and backward
    tiny lm step                   one training step of a small decoder
    mlp step                       one training step of a perceptron
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

DEFAULT = (
    "matmul 512",
    "matmul 1024",
    "matmul 512 NT",
    "matmul 512 TN",
    "matmul 1024 NT",
    "matmul 1024 TN",
    "matmul 1752x4720x584",
    "matmul 1000x33x257",
    "matmul 1000x32x256",
    "attention 1x4x512x64 f+b",
    "mlp step",
    "tiny lm step",
)
CHECKED_STEPS = 4  # losses of this many training steps on one batch are compared with float64
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01  # AdamW, decay on every parameter


class Unsupported(Exception):
    """The library has no way to do this work; the text says what is missing."""


@dataclass(frozen=True)
class Matmul:
    """C = op(A) op(B), float32, operands resident."""

    name: str
    m: int
    k: int
    n: int
    trans_a: bool = False
    trans_b: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.k * self.n

    @property
    def least_bytes(self) -> int:
        """Of RAM, at least: the operands, the same and the result in float64, and a library's own of each."""
        operands, result = self.m * self.k + self.k * self.n, self.m * self.n
        return 16 * operands + 12 * result

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """A [m, k] ([k, m] with trans_a) and B [k, n] ([n, k] with trans_b), normal(0, 1)."""
        rng = np.random.default_rng(1)
        a = rng.standard_normal((self.k, self.m) if self.trans_a else (self.m, self.k), np.float32)
        b = rng.standard_normal((self.n, self.k) if self.trans_b else (self.k, self.n), np.float32)
        return a, b

    def reference(self) -> dict[str, np.ndarray]:
        """c [m, n] in float64."""
        a, b = (x.astype(np.float64) for x in self.inputs())
        return {"c": (a.T if self.trans_a else a) @ (b.T if self.trans_b else b)}


@dataclass(frozen=True)
class Attention:
    """Causal attention, forward and backward, scale 1/sqrt(head_dim)."""

    name: str
    batch: int
    heads: int
    seq: int
    head_dim: int

    @property
    def least_bytes(self) -> int:
        """Of RAM, at least: four operands, the same and four results in float64, a library's own of each; and four
        float64 matrices of scores and their gradients."""
        rows = self.batch * self.heads * self.seq
        return 4 * rows * self.head_dim * (4 + 8 + 8 + 4 + 4) + 4 * rows * self.seq * 8

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v and the gradient of the output, each [batch, heads, seq, head_dim], normal(0, 1)."""
        rng = np.random.default_rng(2)
        shape = (self.batch, self.heads, self.seq, self.head_dim)
        q, k, v, d_o = (rng.standard_normal(shape, np.float32) for _ in range(4))
        return q, k, v, d_o

    def reference(self) -> dict[str, np.ndarray]:
        """o and the gradients d_q, d_k, d_v in float64, with the scores written out."""
        q, k, v, d_o = (x.astype(np.float64) for x in self.inputs())
        scale = self.head_dim**-0.5
        scores = q @ k.swapaxes(-1, -2) * scale
        scores[..., ~np.tri(self.seq, dtype=bool)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        d_p = d_o @ v.swapaxes(-1, -2)
        d_scores = p * (d_p - (d_p * p).sum(-1, keepdims=True)) * scale
        return {
            "o": p @ v,
            "d_q": d_scores @ k,
            "d_k": d_scores.swapaxes(-1, -2) @ q,
            "d_v": p.swapaxes(-1, -2) @ d_o,
        }


@dataclass(frozen=True)
class MlpStep:
    """Forward, cross-entropy, backward and AdamW of a perceptron with ReLU between its layers."""

    name: str = "mlp step"
    sizes: tuple[int, ...] = (256, 512, 512, 16)
    batch: int = 512

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """x [batch, sizes[0]] float32, and int64 labels [batch]."""
        rng = np.random.default_rng(3)
        x = rng.standard_normal((self.batch, self.sizes[0]), np.float32)
        return x, rng.integers(0, self.sizes[-1], self.batch)

    def weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(weight [in, out], bias [out]) of each layer."""
        rng = np.random.default_rng(4)
        pairs = itertools.pairwise(self.sizes)
        return [
            ((rng.standard_normal((i, o)) * (2 / i) ** 0.5).astype(np.float32), np.zeros(o, np.float32))
            for i, o in pairs
        ]

    def reference(self) -> dict[str, np.ndarray]:
        """Losses of the first CHECKED_STEPS steps in float64, each before its update."""
        x, labels = self.data()
        parameters = [p.astype(np.float64) for pair in self.weights() for p in pair]
        moments = [(np.zeros_like(p), np.zeros_like(p)) for p in parameters]
        losses = []
        for step in range(1, CHECKED_STEPS + 1):
            loss, gradients = self._gradients(x.astype(np.float64), labels, parameters)
            losses.append(loss)
            for p, g, (first, second) in zip(parameters, gradients, moments, strict=True):
                first += (1 - BETA1) * (g - first)
                second += (1 - BETA2) * (g * g - second)
                p *= 1 - LEARNING_RATE * WEIGHT_DECAY
                root = np.sqrt(second / (1 - BETA2**step)) + EPS
                p -= LEARNING_RATE * first / (1 - BETA1**step) / root
        return {"losses": np.array(losses)}

    def _gradients(
        self, x: np.ndarray, labels: np.ndarray, parameters: list[np.ndarray]
    ) -> tuple[float, list[np.ndarray]]:
        weights, biases = parameters[0::2], parameters[1::2]
        inputs = [x]
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            y = inputs[-1] @ w + b
            inputs.append(np.maximum(y, 0) if i < len(weights) - 1 else y)
        logits = inputs.pop()
        shifted = logits - logits.max(1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows = np.arange(len(labels))
        d = np.exp(log_p)
        d[rows, labels] -= 1
        d /= len(labels)
        gradients: list[np.ndarray] = []
        for w, inner in zip(weights[::-1], inputs[::-1], strict=True):
            gradients[:0] = [inner.T @ d, d.sum(0)]
            d = (d @ w.T) * (inner > 0)
        return float(-log_p[rows, labels].mean()), gradients


@dataclass(frozen=True)
class LmStep:
    """Forward, cross-entropy, backward and AdamW of a decoder: RMSNorm, RoPE (half-rotation), grouped heads, SwiGLU, a
    head of its own; 459,392 parameters."""

    name: str = "tiny lm step"
    vocab: int = 256
    d_model: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    d_ff: int = 384
    seq: int = 128
    batch: int = 4
    norm_eps: float = 1e-5
    rope_base: float = 1e4

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.heads

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets, int32 [batch, seq]."""
        windows = np.random.default_rng(5).integers(0, self.vocab, (self.batch, self.seq + 1)).astype(np.int32)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def weights(self) -> dict[str, np.ndarray]:
        """vkfold's names -> values: matrices [in, out] but for embedding and head [vocab, d]; q, k and v side by side,
        gate and value side by side."""
        d, qkv = self.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocab, d)}
        for i in range(self.layers):
            shapes |= {
                f"blocks.{i}.norm1.weight": (d,),
                f"blocks.{i}.attention.qkv.weight": (d, qkv),
                f"blocks.{i}.attention.out.weight": (self.heads * self.head_dim, d),
                f"blocks.{i}.norm2.weight": (d,),
                f"blocks.{i}.feed_forward.up.weight": (d, 2 * self.d_ff),
                f"blocks.{i}.feed_forward.down.weight": (self.d_ff, d),
            }
        shapes |= {"final_norm.weight": (d,), "head": (self.vocab, d)}
        rng = np.random.default_rng(6)
        return {
            name: np.ones(shape, np.float32) if len(shape) == 1 else (rng.standard_normal(shape) * 0.02).astype("f4")
            for name, shape in shapes.items()
        }

    def rope_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [seq, head_dim / 2], worked out in float64."""
        frequencies = self.rope_base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.arange(self.seq)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


Work = Matmul | Attention | MlpStep | LmStep


def work_named(name: str) -> Work:
    """The work of a name. Raises ValueError for a name that is none."""
    if name == "tiny lm step":
        return LmStep()
    if name == "mlp step":
        return MlpStep()
    if found := re.fullmatch(r"matmul (\d{1,18})(?:x(\d{1,18})x(\d{1,18}))?(?: ([NT])([NT]))?", name):
        m, k, n = (int(found[i] or found[1]) for i in (1, 2, 3))
        if min(m, k, n) > 0:
            return Matmul(name, m, k, n, found[4] == "T", found[5] == "T")
    if found := re.fullmatch(r"attention (\d{1,18})x(\d{1,18})x(\d{1,18})x(\d{1,18}) f\+b", name):
        sizes = [int(size) for size in found.groups()]
        if min(sizes) > 0:
            return Attention(name, *sizes)
    raise ValueError(f"{name!r} is no work: see `./run bench --list`")


def error_of(results: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """Largest |result - reference| / largest |reference|, the worst over all arrays. Infinite for what is missing,
    misshapen or not finite."""
    worst = 0.0
    for name, wanted in reference.items():
        got = results.get(name)
        if got is None or got.shape != wanted.shape or not np.isfinite(got).all():
            return float("inf")
        worst = max(worst, float(np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()))
    return worst
