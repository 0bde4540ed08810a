"""The verbs of every engine: each op's function, bound as a method, so that `engine.matmul(a, b)` is typed and listed.

An op's function takes the engine first; as a class attribute it is a method like any other.
"""

from __future__ import annotations

from .ops import activation as activation_op
from .ops import adafactor as adafactor_op
from .ops import adamw as adamw_op
from .ops import adamw_many as adamw_many_op
from .ops import add as add_op
from .ops import add_bias as add_bias_op
from .ops import affine as affine_op
from .ops import attention as attention_op
from .ops import attention_qkv as attention_qkv_op
from .ops import attention_sinks as attention_sinks_op
from .ops import block_fold as block_fold_op
from .ops import cast as cast_op
from .ops import column_sum as column_sum_op
from .ops import copy as copy_op
from .ops import cross_entropy as cross_entropy_op
from .ops import divide as divide_op
from .ops import dropout as dropout_op
from .ops import embedding as embedding_op
from .ops import fill as fill_op
from .ops import fma_chain as fma_chain_op
from .ops import fold as fold_op
from .ops import gradient_norm as gradient_norm_op
from .ops import layer_norm as layer_norm_op
from .ops import map as map_op
from .ops import matmul as matmul_op
from .ops import multiply as multiply_op
from .ops import rms_norm as rms_norm_op
from .ops import rope as rope_op
from .ops import scale as scale_op
from .ops import sgd as sgd_op
from .ops import sgd_many as sgd_many_op
from .ops import softmax as softmax_op
from .ops import subtract as subtract_op
from .ops import sum as sum_op
from .ops import swiglu as swiglu_op
from .ops import zero as zero_op


class OpVerbs:
    """All ops. The text of each is in engine/ops/, one file an op."""

    activation = activation_op.activation
    activation_backward = activation_op.activation_backward
    adafactor_ = adafactor_op.adafactor_
    adamw_ = adamw_op.adamw_
    adamw_many_ = adamw_many_op.adamw_many_
    add = add_op.add
    add_ = add_op.add_
    add_bias_ = add_bias_op.add_bias_
    affine = affine_op.affine
    attention = attention_op.attention
    attention_backward = attention_op.attention_backward
    attention_qkv = attention_qkv_op.attention_qkv
    attention_qkv_backward = attention_qkv_op.attention_qkv_backward
    attention_sinks_backward = attention_sinks_op.attention_sinks_backward
    block_fold = block_fold_op.block_fold
    cast = cast_op.cast
    column_sum = column_sum_op.column_sum
    copy = copy_op.copy
    copy_into = copy_op.copy_into
    cross_entropy = cross_entropy_op.cross_entropy
    cross_entropy_backward_ = cross_entropy_op.cross_entropy_backward_
    divide = divide_op.divide
    divide_by = divide_op.divide_by
    divide_into = divide_op.divide_into
    dropout = dropout_op.dropout
    dropout_add = dropout_op.dropout_add
    embedding = embedding_op.embedding
    embedding_backward = embedding_op.embedding_backward
    fill_ = fill_op.fill_
    fma_chain = fma_chain_op.fma_chain
    fold = fold_op.fold
    gelu = activation_op.gelu
    gradient_norm = gradient_norm_op.gradient_norm
    layer_norm = layer_norm_op.layer_norm
    layer_norm_apply = layer_norm_op.layer_norm_apply
    layer_norm_backward = layer_norm_op.layer_norm_backward
    layer_norm_weight_backward = layer_norm_op.layer_norm_weight_backward
    map = map_op.map_expressions
    matmul = matmul_op.matmul
    multiply = multiply_op.multiply
    relu = activation_op.relu
    rms_norm = rms_norm_op.rms_norm
    rms_norm_apply = rms_norm_op.rms_norm_apply
    rms_norm_backward = rms_norm_op.rms_norm_backward
    rms_norm_weight_backward = rms_norm_op.rms_norm_weight_backward
    rope_ = rope_op.rope_
    scale = scale_op.scale
    sgd_ = sgd_op.sgd_
    sgd_many_ = sgd_many_op.sgd_many_
    silu = activation_op.silu
    softmax = softmax_op.softmax
    softmax_backward = softmax_op.softmax_backward
    subtract = subtract_op.subtract
    sum = sum_op.sum_all
    swiglu = swiglu_op.swiglu
    swiglu_backward = swiglu_op.swiglu_backward
    zero_ = zero_op.zero_
