// A second moment that is not factored: each subgroup updates one chunk of it and sums the squares of the chunk's
// update, g / sqrt(v).
#include "rows.glsl"

void main() {
    const uint part = subgroup_row();
    if (part >= args.parts) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    const float weight = args.step.square_weight;
    const uint begin = part * args.chunk, count = min(args.chunk, args.n - min(args.n, begin));
    vec4 sums = vec4(0.0);
    for (uint c = 4 * gl_SubgroupInvocationID; c < count; c += 4 * gl_SubgroupSize) {
        const vec4 g = load4(args.g, begin, c, count) * clip;
        const vec4 v = fma(vec4(1.0 - weight), load4(args.v, begin, c, count), weight * (g * g + args.eps));
        store4(args.v, begin, c, count, v);
        const vec4 update = inside4(g / sqrt(v), vec4(0.0), c, count);
        sums = fma(update, update, sums);
    }
    const float total = subgroupAdd(sum4(sums));
    if (subgroupElect()) args.squares.v[part] = total;
}
