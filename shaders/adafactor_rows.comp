// One subgroup a row of the gradient: mean of its squares, into the moving average of row means.
#include "rows.glsl"
#include "turns.glsl"

void main() {
    const uint row = subgroup_row(), cols = args.cols;
    if (row >= args.rows) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    vec4 sums = vec4(0.0);
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    uint base = 0;
#define ADD(u)                                                                       \
    {                                                                                \
        const vec4 g = load4_inside(args.g, row * cols, base + u * stride + first);  \
        sums = fma(g, g, sums);                                                      \
    }
#if TURNS > 1
    for (; cols - base >= TURNS * stride; base += TURNS * stride) IN_TURNS(ADD)
#endif
    for (; base < cols; base += stride) {
        const vec4 g = load4(args.g, row * cols, base + first, cols);
        sums = fma(g, g, sums);
    }
    const float total = subgroupAdd(sum4(sums));
    const float weight = args.step.square_weight;
    const float fresh = (clip * clip) * (total / float(cols)) + args.eps;
    if (subgroupElect()) args.r.v[row] = fma(1.0 - weight, args.r.v[row], weight * fresh);
}
