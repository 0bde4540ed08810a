// Each subgroup sums one chunk of a flat array.
#include "rows.glsl"
#include "turns.glsl"

void main() {
    const uint part = subgroup_row();
    if (part >= args.parts) return;
    const uint begin = part * args.chunk, count = min(args.chunk, args.n - min(args.n, begin));
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    vec4 sums = vec4(0.0);
    uint base = 0;
#define ADD(u) sums += load4_inside(args.x, begin, base + u * stride + first)
    for (; count - base >= TURNS * stride; base += TURNS * stride) IN_TURNS(ADD)
    for (; base < count; base += stride) sums += load4(args.x, begin, base + first, count);
    const float total = subgroupAdd(sum4(sums));
    if (subgroupElect()) args.y.v[part] = total;
}
