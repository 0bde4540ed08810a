// Rotates pairs of columns in place: (a, b) -> (a cos - b sin, a sin + b cos). A piece reads cos and sin of its
// columns once and goes over HEADS heads of one row. INTERLEAVED: four columns, pairs 2i and 2i + 1 of a head; else four
// columns i and those half a head further.
#include "rows.glsl"

#if INTERLEAVED
float table_at(F32 table, uint start, uint pair) { return pair < args.half_dim ? table.v[start + pair] : 0.0; }
#endif

void piece(uint index) {
    const uint half_dim = args.half_dim, head_dim = 2 * half_dim;
    const uint quads = INTERLEAVED != 0 ? (half_dim + 1) / 2 : (half_dim + 3) / 4;
    const uint head_groups = (args.num_heads + HEADS - 1) / HEADS;
    const uint rest = index / quads, quad = index - rest * quads;
    const uint row = rest / head_groups, first_head = (rest - row * head_groups) * HEADS;
    if (row >= args.num_rows) return;
    const uint end_head = min(args.num_heads, first_head + HEADS);
    const uint table_row = (row % args.seq + args.position_offset) * half_dim;
    const uint c = 4 * quad;
#if INTERLEAVED
    const vec4 cos4 = vec2(table_at(args.cos_table, table_row, c / 2), table_at(args.cos_table, table_row, c / 2 + 1)).xxyy;
    vec4 sin4 = vec2(table_at(args.sin_table, table_row, c / 2), table_at(args.sin_table, table_row, c / 2 + 1)).xxyy;
    sin4 *= args.direction;
#else
    const vec4 cos4 = load4(args.cos_table, table_row, c, half_dim);
    const vec4 sin4 = load4(args.sin_table, table_row, c, half_dim) * args.direction;
#endif
    for (uint head = first_head; head < end_head; head++) {
        const uint start = row * args.width + head * head_dim;
#if INTERLEAVED
        const vec4 x = load4(args.x, start, c, head_dim);
        const vec4 b = x * sin4; // a sin and b sin, where they are
        store4(args.x, start, c, head_dim, vec4(
            fma(x.x, cos4.x, -b.y), fma(x.x, sin4.x, x.y * cos4.y), fma(x.z, cos4.z, -b.w), fma(x.z, sin4.z, x.w * cos4.w)));
#else
        const vec4 a = load4(args.x, start, c, half_dim), b = load4(args.x, start + half_dim, c, half_dim);
        store4(args.x, start, c, half_dim, fma(a, cos4, -(b * sin4)));
        store4(args.x, start + half_dim, c, half_dim, fma(a, sin4, b * cos4));
#endif
    }
}

#include "pieces.glsl"
