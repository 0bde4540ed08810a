"""Layers, models, losses, optimizers: explicit forward and backward on a ComputeEngine."""

from .attention import Attention
from .embedding import Embedding
from .feed_forward import FeedForward
from .fused_update import FusedUpdate
from .gpt_block import GPTBlock
from .gpt_config import GPTConfig
from .gpt_model import GPTModel
from .kv_cache import KVCache
from .layer import Layer
from .layer_norm import LayerNorm
from .linear import Linear
from .losses import CrossEntropyLoss, LinearCrossEntropy
from .optimizers import SGD, Adafactor, AdamW, Optimizer
from .parameter import Parameter
from .rms_norm import RMSNorm
from .rope import Rope, RopeScaling
from .sampling import Sampler, generate
from .schedules import Schedule, constant, cosine
from .softmax import Softmax
from .training_step import StepResult, TrainingStep, evaluate_loss

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "Attention",
    "CrossEntropyLoss",
    "Embedding",
    "FeedForward",
    "FusedUpdate",
    "GPTBlock",
    "GPTConfig",
    "GPTModel",
    "KVCache",
    "Layer",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "Optimizer",
    "Parameter",
    "RMSNorm",
    "Rope",
    "RopeScaling",
    "Sampler",
    "Schedule",
    "Softmax",
    "StepResult",
    "TrainingStep",
    "constant",
    "cosine",
    "evaluate_loss",
    "generate",
]
