// AdamW on one tensor, four elements a piece.
#include "rows.glsl"
#include "adamw.glsl"

void piece(uint i) {
    const uint n = args.n;
    if (i > (n - 1) / 4) return;
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    const uint c = 4 * i;
    vec4 m = load4(args.m, 0, c, n), v = load4(args.v, 0, c, n), p = load4(args.p, 0, c, n);
    adamw(load4(args.g, 0, c, n) * clip, m, v, p, args.weight_decay);
    store4(args.m, 0, c, n, m);
    store4(args.v, 0, c, n, v);
    store4(args.p, 0, c, n, p);
}

#include "pieces.glsl"
