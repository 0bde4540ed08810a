"""One pre-norm transformer block, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .attention import Attention
from .feed_forward import FeedForward
from .layer import Layer
from .layer_norm import LayerNorm
from .rms_norm import RMSNorm, Stats

RECOMPUTE_GROUPS = ("norm", "activation", "attention", "qkv", "mlp")


def make_norm(engine: ComputeEngine, kind: str, dim: int, eps: float) -> RMSNorm | LayerNorm:
    """The norm called "rmsnorm" or "layernorm". Raises ValueError for another name."""
    if kind == "rmsnorm":
        return RMSNorm(engine, dim, eps=eps, seed=None)
    if kind == "layernorm":
        return LayerNorm(engine, dim, eps=eps, seed=None)
    raise ValueError(f"unknown norm {kind!r}: use rmsnorm or layernorm")


class GPTBlock(Layer):
    """mid = x + dropout(attention(norm1(x))); y = mid + dropout(feed_forward(norm2(mid))).

    Keeps x, mid, the norms' row scalars, and what attention (qkv, O, log-sum-exp) and feed-forward (pre-activation)
    keep. Norm and activation outputs are rebuilt by one elementwise dispatch where a weight gradient needs them.
    first_site: the dropout sites of this block are first_site and first_site + 1.
    """

    def __init__(
        self,
        engine: ComputeEngine,
        attention: Attention,
        feed_forward: FeedForward,
        norm1: RMSNorm | LayerNorm,
        norm2: RMSNorm | LayerNorm,
        *,
        dropout: float = 0.0,
        first_site: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(engine)
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.feed_forward = feed_forward
        self.dropout = dropout
        self.first_site = first_site
        self.recompute: frozenset[str] = frozenset()
        self.initialize(seed)

    def set_recompute(self, groups: Iterable[str]) -> None:
        """Name what is freed in forward once read, and rebuilt in backward: any of `RECOMPUTE_GROUPS`.

        norm: the row scalars; attention: O and log-sum-exp; qkv: q, k, v; mlp: the pre-activation. "activation" is
        accepted and changes nothing: activation outputs are never kept. Raises ValueError for another name.
        """
        chosen = frozenset(groups)
        unknown = sorted(chosen - set(RECOMPUTE_GROUPS))
        if unknown:
            raise ValueError(f"cannot recompute {', '.join(unknown)}: choose among {', '.join(RECOMPUTE_GROUPS)}")
        self.recompute = self.attention.recompute = self.feed_forward.recompute = chosen
        self.release_cache()

    def forward(self, x: Tensor, need_output: bool = True) -> Tensor:
        """x [batch, seq, d] -> y [batch, seq, d]. Without need_output only what backward needs is made.

        In that case what is returned is of no use.
        """
        self.start_forward()
        p = self.dropout if self.training else 0.0
        if p:
            mid = self.engine.dropout_add(self.attention.run(lambda: self._norm1(x)), x, p=p, site=self.first_site)
        else:
            mid = self.attention.run(lambda: self._norm1(x), x)
        self.keep(x=x, mid=mid)
        if p and need_output:
            branch = self.feed_forward.run(lambda: self._norm2(mid))
            assert branch is not None
            return self.engine.dropout_add(branch, mid, p=p, site=self.first_site + 1)
        y = self.feed_forward.run(lambda: self._norm2(mid), mid, need_output)
        if y is None:
            if self.keeps and "norm" not in self.recompute and "norm2.0" not in self.kept:
                self._norm2(mid)  # the feed-forward had nothing to make, but the row scalars are to be kept
            return mid
        return y

    def forward_recompute(self, saved_input: Tensor, need_output: bool = True) -> Tensor:
        """Run forward once more, keeping what backward needs; without need_output the last matmul is left out."""
        mode = self.checkpoint_mode
        self.set_checkpoint_mode(False)
        try:
            return self.forward(saved_input, need_output)
        finally:
            self.set_checkpoint_mode(mode)

    def backward(self, dy: Tensor) -> Tensor:
        """dy [batch, seq, d] -> dx, in the same memory: dy is overwritten and returned."""
        x, mid = self.take("x"), self.take("mid")
        self._feed_forward_backward(dy, mid)
        del mid
        self._attention_backward(dy, x)
        return dy

    def _feed_forward_backward(self, dy: Tensor, mid: Tensor) -> None:
        stats = self._take_stats("norm2", self.norm2, mid)
        p = self.dropout if self.training else 0.0
        d_branch = self.engine.dropout(dy, p=p, site=self.first_site + 1) if p else dy
        d_norm = self.feed_forward.backward_from(d_branch, lambda: self._rebuild("norm2_out", self.norm2, mid, stats))
        del d_branch
        self.engine.add_(dy, self.norm2.backward_from(d_norm, mid, stats))

    def _attention_backward(self, dy: Tensor, x: Tensor) -> None:
        stats = self._take_stats("norm1", self.norm1, x)
        p = self.dropout if self.training else 0.0
        d_branch = self.engine.dropout(dy, p=p, site=self.first_site) if p else dy
        d_norm = self.attention.backward_from(d_branch, lambda: self._rebuild("norm1_out", self.norm1, x, stats))
        del d_branch
        self.engine.add_(dy, self.norm1.backward_from(d_norm, x, stats))

    def _norm1(self, x: Tensor) -> Tensor:
        y, stats = self.norm1.normalize(x)
        self._keep_stats("norm1", stats)
        self.made(norm1_out=y)
        return y

    def _norm2(self, mid: Tensor) -> Tensor:
        y, stats = self.norm2.normalize(mid)
        self._keep_stats("norm2", stats)
        self.made(norm2_out=y)
        return y

    def _rebuild(self, name: str, norm: RMSNorm | LayerNorm, x: Tensor, stats: Stats) -> Tensor:
        y = norm.rebuild(x, stats)
        self.made_again(**{name: y})
        return y

    def _keep_stats(self, name: str, stats: Stats) -> None:
        named = {f"{name}.{i}": scalar for i, scalar in enumerate(stats)}
        if "norm" in self.recompute:
            self.made(**named)
        else:
            self.keep(**named)

    def _take_stats(self, name: str, norm: RMSNorm | LayerNorm, x: Tensor) -> Stats:
        if "norm" in self.recompute:
            stats = norm.normalize(x)[1]
            self.recomputed(**{f"{name}.{i}": scalar for i, scalar in enumerate(stats)})
            return stats
        return tuple(self.take(f"{name}.{i}") for i in range(norm.num_stats))
