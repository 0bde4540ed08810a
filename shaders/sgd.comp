// SGD on one tensor, four elements a piece.
#include "rows.glsl"
#include "sgd.glsl"

void piece(uint i) {
    const uint n = args.n;
    if (i > (n - 1) / 4) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    const uint c = 4 * i;
    vec4 p = load4(args.p, 0, c, n), b = vec4(0.0);
#if MOMENTUM
    b = load4(args.b, 0, c, n);
#endif
    sgd(load4(args.g, 0, c, n) * clip, b, p, args.weight_decay);
#if MOMENTUM
    store4(args.b, 0, c, n, b);
#endif
    store4(args.p, 0, c, n, p);
}

#include "pieces.glsl"
