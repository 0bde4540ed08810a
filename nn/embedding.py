"""A table of vectors, looked up by integer."""

from __future__ import annotations

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .layer import Layer
from .parameter import Parameter


class Embedding(Layer):
    """y[..., d] = weight[tokens[...]], weight [num_embeddings, d]. Keeps the tokens."""

    def __init__(
        self, engine: ComputeEngine, num_embeddings: int, dim: int, *, std: float = 0.02, seed: int | None = 0
    ) -> None:
        super().__init__(engine)
        self.weight = Parameter(engine, (num_embeddings, dim), std=std)
        self.initialize(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int32 [...] in 0..num_embeddings-1 (the caller checks) -> [..., d]."""
        self.start_forward()
        self.keep(tokens=tokens)
        return self.engine.embedding(self.weight.data, tokens)

    def backward(self, dy: Tensor) -> None:
        """dy [..., d]: adds to the table's gradient, in a fixed order. Tokens have no gradient."""
        out, accumulate = self.weight.gradient()
        self.engine.embedding_backward(dy, self.take("tokens"), out, accumulate=accumulate)
        self.weight.gradient_written()
