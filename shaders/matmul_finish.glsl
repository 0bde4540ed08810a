// The epilogue of one element of C whose sum is complete: the one place that knows it. The text of `activate` comes
// first: engine/ops/activation.py.
const uint BIAS = 1u, RESIDUAL = 2u, BIAS_BY_ROW = 4u;

float finish(float sum, float bias, float residual) {
    float value = sum;
    if ((args.flags & BIAS) != 0u) value += bias;
    value = activate(value, args.activation);
    if ((args.flags & RESIDUAL) != 0u) value = residual + value;
    return value;
}

// Element (row, column) of one product of the batch; c_start: where its C begins.
float finish_at(float sum, uint c_start, uint row, uint column) {
    float bias = 0.0, residual = 0.0;
    if ((args.flags & BIAS) != 0u) bias = args.bias.v[(args.flags & BIAS_BY_ROW) != 0u ? row : column];
    if ((args.flags & RESIDUAL) != 0u) residual = args.residual.v[c_start + row * args.c_row + column * args.c_col];
    return finish(sum, bias, residual);
}
