// One SGD update, four elements an invocation; MOMENTUM says whether there is a momentum buffer. As in adamw.comp the
// parameter is rounded once.
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
    const vec4 p = load4(args.p, 0, c, n);
    vec4 direction = g;
#if MOMENTUM
    const vec4 b = fma(vec4(args.momentum), load4(args.b, 0, c, n), g);
    direction = args.nesterov != 0 ? fma(vec4(args.momentum), b, g) : b;
    store4(args.b, 0, c, n, b);
#endif
    const float rate = args.step.learning_rate;
    store4(args.p, 0, c, n, p - fma(vec4(rate * args.weight_decay), p, rate * direction));
}
