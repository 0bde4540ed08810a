// The update of one row by one subgroup. APPLY 0: the sum of squares of the unscaled update; APPLY 1: the parameter.
//
// FACTORED: the second moment of element (i, j) is r[i] m[j] / mean(r). It is never formed: r[i] m[j] would leave
// float32's range where gradients are small, while (g sqrt(mean(r)) / sqrt(r[i])) / sqrt(m[j]) does not.
// Otherwise it is v, and the row is one chunk of a flat array.
#include "rows.glsl"

float clip_factor() {
    if (args.has_state == 0) return 1.0;
    return args.state.v[0];
}

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const float clip = clip_factor();
    if (args.has_state != 0 && args.state.v[1] == 0.0) return;
#if FACTORED
    const uint start = row * args.cols, count = args.cols;
    const float row_factor = sqrt(args.r_sum.v[0] / float(args.rows)) / sqrt(args.r.v[row]) * clip;
#else
    const uint start = row * args.cols, count = min(args.cols, args.n - min(args.n, start));
    const float row_factor = clip;
#endif
#if APPLY
    // RMS of the update, and the step it is scaled to: at most `threshold` times the rate.
    const float rms = sqrt(args.update_sum.v[0] / float(args.n));
    float rate = args.step.learning_rate;
    if (args.relative != 0) rate *= max(args.eps, sqrt(args.p_sum.v[0] / float(args.n)));
    const float scaled = rate / max(1.0, rms / args.threshold);
    const float decay = rate * args.weight_decay;
#else
    vec4 sums = vec4(0.0);
#endif
    for (uint c = 4 * gl_SubgroupInvocationID; c < count; c += 4 * gl_SubgroupSize) {
#if FACTORED
        const vec4 moment = load4(args.m, 0, c, count);
#else
        const vec4 moment = load4(args.m, start, c, count);
#endif
        const vec4 update = inside4(load4(args.g, start, c, count) * row_factor / sqrt(moment), vec4(0.0), c, count);
#if APPLY
        const vec4 p = load4(args.p, start, c, count);
        store4(args.p, start, c, count, p - fma(vec4(decay), p, scaled * update));
#else
        sums = fma(update, update, sums);
#endif
    }
#if !APPLY
    const float total = subgroupAdd(sum4(sums));
    if (subgroupElect()) args.squares.v[row] = total;
#endif
}
