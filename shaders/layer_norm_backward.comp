// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight and xhat = (x - mean) * rstd.
// accumulate: what dx holds + that.
#include "rows.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    const float mean = args.mean.v[row], rstd = args.rstd.v[row];
    vec4 sums = vec4(0.0), dots = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 g = load4(args.dy, start, c, cols) * load4(args.weight, 0, c, cols); // 0 past the last column
        sums += g;
        dots = fma(g, (load4(args.x, start, c, cols) - mean) * rstd, dots);
    }
    const float mean_g = subgroupAdd(sum4(sums)) / float(cols);
    const float mean_dot = subgroupAdd(sum4(dots)) / float(cols);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 g = load4(args.dy, start, c, cols) * load4(args.weight, 0, c, cols);
        vec4 xhat = (load4(args.x, start, c, cols) - mean) * rstd;
        vec4 dx = rstd * ((g - mean_g) - xhat * mean_dot);
        if (args.accumulate != 0u) dx = load4(args.dx, start, c, cols) + dx;
        store4(args.dx, start, c, cols, dx);
    }
}
