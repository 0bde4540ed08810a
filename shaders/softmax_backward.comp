// dx = y (dy - sum(dy y)) of each row.
#include "rows.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    vec4 products = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        const uint c = base + first;
        products = fma(load4(args.dy, start, c, cols), load4(args.y, start, c, cols), products);
    }
    const float mean = subgroupAdd(sum4(products));
    for (uint base = 0; base < cols; base += stride) {
        const uint c = base + first;
        store4(args.dx, start, c, cols, load4(args.y, start, c, cols) * (load4(args.dy, start, c, cols) - mean));
    }
}
