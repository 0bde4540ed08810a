"""vkfold itself, through its public API."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import work as works
from work import Attention, LmStep, Matmul, MlpStep, Work

import vkfold as vf


class MatmulJob:
    """C = op(A) op(B)."""

    def __init__(self, engine: vf.VulkanEngine, work: Matmul) -> None:
        self.engine = engine
        a, b = work.inputs()
        self.a, self.b = engine.tensor(a), engine.tensor(b)
        self.transposes = {"trans_a": work.trans_a, "trans_b": work.trans_b}
        engine.end_batch()

    def run(self) -> None:
        """Once."""
        self.c = self.engine.matmul(self.a, self.b, **self.transposes)
        self.engine.end_batch()

    def results(self) -> dict[str, np.ndarray]:
        """c [m, n]."""
        return {"c": self.c.numpy()}


class AttentionJob:
    """Forward and backward; vkfold's layout is [batch, seq, heads, head_dim]."""

    def __init__(self, engine: vf.VulkanEngine, work: Attention) -> None:
        self.engine = engine
        self.q, self.k, self.v, self.d_o = (engine.tensor(x.swapaxes(1, 2)) for x in work.inputs())
        engine.end_batch()

    def run(self) -> None:
        """Once."""
        self.o, lse = self.engine.attention(self.q, self.k, self.v)
        self.gradients = self.engine.attention_backward(self.d_o, self.q, self.k, self.v, self.o, lse)
        self.engine.end_batch()

    def results(self) -> dict[str, np.ndarray]:
        """o, d_q, d_k, d_v."""
        tensors = (self.o, *self.gradients)
        return {name: t.numpy().swapaxes(1, 2) for name, t in zip(("o", "d_q", "d_k", "d_v"), tensors, strict=True)}


class Perceptron(vf.nn.Layer):
    """Linear layers with ReLU between and cross-entropy on top; its one batch is resident."""

    def __init__(self, engine: Any, work: MlpStep) -> None:
        super().__init__(engine)
        self.layers = [vf.nn.Linear(engine, i, o, seed=None) for i, o in itertools.pairwise(work.sizes)]
        self.initialize(0)
        values: dict[str, np.ndarray] = {}
        for i, (weight, bias) in enumerate(work.weights()):
            values |= {f"layers.{i}.weight": weight, f"layers.{i}.bias": bias}
        self.load_state_dict(values)
        x, labels = work.data()
        self.x, self.labels = engine.tensor(x), engine.tensor(labels.astype(np.int32))

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        """Sum of losses [1] over the resident batch."""
        self.inputs = [self.x]
        for layer in self.layers[:-1]:
            assert layer.bias is not None
            y = self.engine.matmul(self.inputs[-1], layer.weight.data, bias=layer.bias.data, activation="relu")
            self.inputs.append(y)
        self.logits = self.layers[-1].apply(self.inputs[-1])
        losses, self.lse = self.engine.cross_entropy(self.logits, self.labels)
        return self.engine.sum(losses)

    def backward(self, dy: Any = None) -> None:
        """Gradients of every weight and bias."""
        d = self.engine.cross_entropy_backward_(self.logits, self.labels, self.lse)
        for layer in reversed(self.layers):
            inner = self.inputs.pop()
            d_inner = layer.input_gradient(d) if self.inputs else None
            layer.weight_gradient(d, inner)
            if d_inner is not None:
                # What ReLU gave is positive just where what it was given is.
                d = self.engine.activation_backward(d_inner, inner, "relu")
        del self.logits, self.lse


class StepJob:
    """Training steps on one batch."""

    def __init__(self, model: Any, batch: tuple[np.ndarray, np.ndarray]) -> None:
        optimizer = vf.nn.AdamW(
            model,
            learning_rate=works.LEARNING_RATE,
            beta1=works.BETA1,
            beta2=works.BETA2,
            eps=works.EPS,
            weight_decay=works.WEIGHT_DECAY,
            decay_all=True,
        )
        self.step = vf.nn.TrainingStep(model, optimizer)
        self.batch = batch
        self.losses: list[float] = []

    def run(self) -> None:
        """One step; its loss comes back to the host."""
        result = self.step([self.batch], step=len(self.losses), learning_rate=works.LEARNING_RATE)
        self.losses.append(result.loss)

    def results(self) -> dict[str, np.ndarray]:
        """Losses of the first steps."""
        while len(self.losses) < works.CHECKED_STEPS:
            self.run()
        return {"losses": np.array(self.losses[: works.CHECKED_STEPS])}


def lm_job(engine: Any, work: LmStep) -> StepJob:
    """The small decoder, on any engine."""
    config = vf.nn.GPTConfig(
        vocab_size=work.vocab,
        max_seq_len=work.seq,
        d_model=work.d_model,
        num_heads=work.heads,
        num_kv_heads=work.kv_heads,
        num_layers=work.layers,
        d_ff=work.d_ff,
        tie_head=False,
        norm_eps=work.norm_eps,
        rope_base=work.rope_base,
    )
    model = vf.nn.GPTModel(engine, config)
    model.load_state_dict(work.weights())
    return StepJob(model, work.data())


def lm_reference(work: LmStep) -> dict[str, np.ndarray]:
    """Losses of the first steps on the float64 CPU engine, which shares no kernel with the device."""
    return lm_job(vf.CpuEngine("float64"), work).results()


class Library:
    """See worker.Library."""

    def __init__(self) -> None:
        self.engine = vf.VulkanEngine()
        self.version = vf.__version__
        physical = self.engine.device.physical
        self.device = physical.name
        self.driver = f"{physical.driver_name} {physical.driver_info}".strip()

    def prepare(self, work: Work) -> Any:
        """Every work."""
        match work:
            case Matmul():
                return MatmulJob(self.engine, work)
            case Attention():
                return AttentionJob(self.engine, work)
            case MlpStep():
                x, labels = work.data()
                return StepJob(Perceptron(self.engine, work), (x, labels))
            case LmStep():
                return lm_job(self.engine, work)
