// Four columns an invocation: partial sums of squares in order, their mean over the rows, into the moving average.
#include "rows.glsl"

void main() {
    const uint cols = args.cols, c = 4 * linear_index();
    if (c >= cols) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    vec4 sum = vec4(0.0);
    for (uint chunk = 0; chunk < args.chunks; chunk++) sum += load4(args.partials, chunk * cols, c, cols);
    const float weight = args.step.square_weight;
    const vec4 fresh = (clip * clip) * (sum / float(args.rows)) + args.eps;
    store4(args.m, 0, c, cols, fma(vec4(1.0 - weight), load4(args.m, 0, c, cols), weight * fresh));
}
