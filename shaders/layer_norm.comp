// y = (x - mean) * rstd * weight + bias. Two passes with a correction (Chan, Golub & LeVeque 1983): the first sums what
// the row is beyond its first element, so that equal elements have no error; the second sums the deviations from that
// mean, and their squares. The deviations' own mean takes out what rounding did, so the mean is right to half a unit in
// its last place however far it lies from 0. APPLY: mean and rstd are given, and y has the same bits.
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
    const float shift = load1(args.x, start);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        sums += inside4(load4(args.x, start, c, cols) - shift, vec4(0.0), c, cols);
    }
    const float first_mean = shift + subgroupAdd(sum4(sums)) / float(cols);
    vec4 deviations = vec4(0.0), squares = vec4(0.0);
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 deviation = inside4(load4(args.x, start, c, cols) - first_mean, vec4(0.0), c, cols);
        deviations += deviation;
        squares = fma(deviation, deviation, squares);
    }
    const float correction = subgroupAdd(sum4(deviations)) / float(cols);
    const float mean = first_mean + correction;
    const float second_moment = subgroupAdd(sum4(squares)) / float(cols);
    // Rounding may leave a little less than 0; a NaN stays one.
    float variance = fma(-correction, correction, second_moment);
    if (variance < 0.0) variance = 0.0;
    const float rstd = inversesqrt(variance + args.eps);
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
