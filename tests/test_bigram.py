"""The bigram yardstick of the demo."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vkfold.tools.bigram import bigram_loss


def test_bigram_loss_by_hand() -> None:
    # Counts of training pairs 0->1 (2), 1->0 (1), 1->1 (0), 0->0 (0), each plus 1.
    train, held_out = np.array([0, 1, 0, 1]), np.array([0, 1, 1])
    expected = -(math.log(3 / 4) + math.log(1 / 3)) / 2
    assert bigram_loss(train, held_out, vocab_size=2, add=1.0) == pytest.approx(expected)
    with pytest.raises(ValueError, match="two tokens"):
        bigram_loss(train, held_out[:1], vocab_size=2)
