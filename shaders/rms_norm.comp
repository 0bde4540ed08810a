// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps). APPLY: rstd is given, and y has the same bits.
#include "rows.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
#if APPLY
    const float rstd = args.rstd.v[row];
#else
    vec4 squares = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        vec4 x = load4(args.x, start, base + first, cols);
        squares = fma(x, x, squares);
    }
    const float rstd = inversesqrt(subgroupAdd(sum4(squares)) / float(cols) + args.eps);
    if (subgroupElect()) args.rstd.v[row] = rstd;
#endif
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 y = (load4(args.x, start, c, cols) * rstd) * load4(args.weight, 0, c, cols);
        store4(args.y, start, c, cols, y);
    }
}
