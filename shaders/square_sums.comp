// Each subgroup sums the squares of one chunk of a flat array; as squares.glsl says where the sum is beyond float32.
#include "rows.glsl"
#include "squares.glsl"
#include "turns.glsl"

void main() {
    const uint part = subgroup_row();
    if (part >= args.parts) return;
    const uint begin = part * args.chunk, count = min(args.chunk, args.n - min(args.n, begin));
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    vec4 sums = vec4(0.0);
    uint base = 0;
#define ADD(u)                                                                  \
    {                                                                           \
        const vec4 x = load4_inside(args.x, begin, base + u * stride + first);  \
        sums = fma(x, x, sums);                                                 \
    }
    for (; count - base >= TURNS * stride; base += TURNS * stride) IN_TURNS(ADD)
    for (; base < count; base += stride) {
        const vec4 x = load4(args.x, begin, base + first, count);
        sums = fma(x, x, sums);
    }
    float total = subgroupAdd(sum4(sums));
    if (isinf(total)) {
        sums = vec4(0.0);
        for (uint base = 0; base < count; base += stride) {
            const vec4 x = load4(args.x, begin, base + first, count) * SMALL;
            sums = fma(x, x, sums);
        }
        total = as_small(subgroupAdd(sum4(sums)));
    }
    if (subgroupElect()) args.y.v[part] = total;
}
