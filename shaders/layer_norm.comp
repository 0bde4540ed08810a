// y = (x - mean) * rstd * weight + bias. The variance is taken from the deviations, in a second pass, because
// mean(x^2) - mean^2 cancels when |mean| is large. APPLY: mean and rstd are given, and y has the same bits.
#include "rows.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
#if APPLY
    const float mean = args.mean.v[row], rstd = args.rstd.v[row];
#else
    vec4 sums = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) sums += load4(args.x, start, base + first, cols);
    const float mean = subgroupAdd(sum4(sums)) / float(cols);
    vec4 squares = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 deviation = inside4(load4(args.x, start, c, cols) - mean, vec4(0.0), c, cols);
        squares = fma(deviation, deviation, squares);
    }
    const float rstd = inversesqrt(subgroupAdd(sum4(squares)) / float(cols) + args.eps);
    if (subgroupElect()) {
        args.mean.v[row] = mean;
        args.rstd.v[row] = rstd;
    }
#endif
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 xhat = (load4(args.x, start, c, cols) - mean) * rstd;
        vec4 y = fma(xhat, load4(args.weight, 0, c, cols), load4(args.bias, 0, c, cols));
        store4(args.y, start, c, cols, y);
    }
}
