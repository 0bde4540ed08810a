// One AdamW update, four elements an invocation. The parameter is changed by one subtraction of the whole step, which
// rounds it once: p (1 - lr wd) first and the step after it would round it twice.
#include "rows.glsl"

void main() {
    const uint i = linear_index(), n = args.n;
    if (i > (n - 1) / 4) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    const uint c = 4 * i;
    const vec4 g = load4(args.g, 0, c, n) * clip;
    const vec4 m = fma(vec4(args.beta1), load4(args.m, 0, c, n), args.one_minus_beta1 * g);
    const vec4 v = fma(vec4(args.beta2), load4(args.v, 0, c, n), args.one_minus_beta2 * (g * g));
    const vec4 p = load4(args.p, 0, c, n);
    const float rate = args.step.learning_rate;
    const vec4 update = (m / args.step.bias_correction1) / (sqrt(v / args.step.bias_correction2) + args.eps);
    store4(args.m, 0, c, n, m);
    store4(args.v, 0, c, n, v);
    store4(args.p, 0, c, n, p - fma(vec4(rate * args.weight_decay), p, rate * update));
}
