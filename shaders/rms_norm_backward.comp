// dx = rstd * (g - xhat * mean(g * xhat)) with g = dy * weight and xhat = x * rstd.
// accumulate: what dx holds + that.
#include "rows.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    const float rstd = args.rstd.v[row];
    vec4 dots = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 g = load4(args.dy, start, c, cols) * load4(args.weight, 0, c, cols);
        dots = fma(g, load4(args.x, start, c, cols) * rstd, dots);
    }
    const float mean_dot = subgroupAdd(sum4(dots)) / float(cols);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 g = load4(args.dy, start, c, cols) * load4(args.weight, 0, c, cols);
        vec4 xhat = load4(args.x, start, c, cols) * rstd;
        vec4 dx = rstd * (g - xhat * mean_dot);
        if (args.accumulate != 0u) dx = load4(args.dx, start, c, cols) + dx;
        store4(args.dx, start, c, cols, dx);
    }
}
