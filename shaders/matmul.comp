// C = A B, float32, any shape, any transposition. A subgroup computes TM rows x SIZE * TN columns of C; every lane holds
// TM x TN sums in registers. Columns of B are loaded by the lane that owns them, values of A by one lane each (16 bytes
// at a time) and spread by broadcast: a value is loaded once a subgroup, and there is no barrier.
//
// Every element of C is one chain fma(a[k], b[k], sum) over k = 0, 1, 2, ... from 0, or with CONTINUE from what C holds,
// whatever the tile: equal bits. A long k comes in slices k_begin .. k_end - 1, a dispatch each, because lavapipe 22.3
// silently ends loops after 65,535 rounds, counted over all loops of an invocation.
// Rows and columns beyond the matrix are clamped to the last one when loading and not stored.
//
// SIZE: lanes of a subgroup. TM: rows of a tile, a multiple of 4. TN: columns a lane, 1 or 4 * NUM_VECTORS.
// TA, TB: A is stored [K, M], B is stored [N, K]. VEC4: rows of A, B and C start on 16 bytes.
// A block is BLOCK values of k: its part of A is A_VECTORS vectors of four a lane, vector q on lane q % SIZE.
// EACH_ROW(F, x), EACH_VECTOR(F, x), EACH_COLUMN(F, x), EACH_A(F, x), EACH_STEP(F, x): F(0, x) F(1, x) ... for the rows,
// vectors and columns a lane holds, its vectors of A and the k of a block. Written out because not all drivers unroll.
// The text of `activate` comes first: engine/ops/activation.py.

#if TN == 1
#define WIDTH 1
#define COLUMNS float
#else
#define WIDTH 4
#define COLUMNS vec4
#endif

#if TA
#define A_VECTOR(r, kk) ((kk) * (TM / 4) + (r) / 4)
#define A_COMPONENT(r, kk) ((r) % 4)
#define A_STEP (BLOCK * m)
#else
#define A_VECTOR(r, kk) ((kk) / 4 * TM + (r))
#define A_COMPONENT(r, kk) ((kk) % 4)
#define A_STEP BLOCK
#endif
#if TB
#define B_STEP BLOCK
#else
#define B_STEP (BLOCK * n)
#endif

const uint BIAS = 1u, RESIDUAL = 2u, CONTINUE = 4u;

vec4 load_row(F32 p, uint i) {
#if VEC4
    return F32x4(uvec2(p)).v[i >> 2];
#else
    return vec4(p.v[i], p.v[i + 1], p.v[i + 2], p.v[i + 3]);
#endif
}

// Elements column .. column + 3 of the row that starts at `start`; positions beyond `last` are clamped.
vec4 load_four(F32 p, uint start, uint column, uint last) {
#if VEC4
    return F32x4(uvec2(p)).v[(start + min(column, last - 3u)) >> 2];
#else
    const uvec4 i = start + min(column + uvec4(0, 1, 2, 3), uvec4(last));
    return vec4(p.v[i.x], p.v[i.y], p.v[i.z], p.v[i.w]);
#endif
}

#if TN == 1
#define load_columns(p, start, column, last) p.v[(start) + min(column, last)]
#else
#define load_columns(p, start, column, last) load_four(p, start, column, last)
#endif

// Columns from `limit` on are left alone.
void store_columns(F32 p, uint start, uint column, uint limit, COLUMNS value) {
    if (column >= limit) return;
    const uint i = start + column;
#if TN == 1
    p.v[i] = value;
#elif VEC4
    F32x4(uvec2(p)).v[i >> 2] = value;
#else
    p.v[i] = value.x;
    if (column + 1u < limit) p.v[i + 1] = value.y;
    if (column + 2u < limit) p.v[i + 2] = value.z;
    if (column + 3u < limit) p.v[i + 3] = value.w;
#endif
}

void main() {
    const uint tile = group_index() * gl_NumSubgroups + gl_SubgroupID;
    const uint tiles = args.tiles_m * args.tiles_n;
    const uint batch = tile / tiles;
    if (batch >= args.batch) return;
    const uint m = args.m, n = args.n, k = args.k;
    const uint row0 = tile % tiles % args.tiles_m * TM;
    const uint col0 = tile % tiles / args.tiles_m * (TN * SIZE) + gl_SubgroupInvocationID * WIDTH;
    const uint lane = gl_SubgroupInvocationID;
    const uint c_start = batch * m * n;
    const uint num_rows = min(uint(TM), m - row0);
    uint a_start = batch * args.stride_a + args.k_begin * (TA == 1 ? m : 1u);
    uint b_start = batch * args.stride_b + args.k_begin * (TB == 1 ? 1u : n);

    // From the start of a block to this lane's vectors of A; rows clamped.
#if !TA
    uint a_index[A_VECTORS];
#define PLACE_A(j, _) { \
        const uint q = (j * SIZE + lane) % (TM * BLOCK / 4); \
        a_index[j] = min(row0 + q % TM, m - 1u) * k + q / TM * 4u; }
#define LOAD_A(j, _) a[j] = load_row(args.a, a_start + a_index[j]);
#else
    uint a_index[A_VECTORS], a_row[A_VECTORS];
#define PLACE_A(j, _) { \
        const uint q = (j * SIZE + lane) % (TM * BLOCK / 4); \
        a_row[j] = row0 + q % (TM / 4) * 4u; \
        a_index[j] = q / (TM / 4) * m; }
#define LOAD_A(j, _) a[j] = load_four(args.a, a_start + a_index[j], a_row[j], m - 1u);
#endif
    EACH_A(PLACE_A, 0)

    // This lane's rows of a transposed B; clamped.
#if TB
    uint b_index[TN];
#define PLACE_B(c, _) b_index[c] = min(col0 + c / WIDTH * (WIDTH * SIZE) + c % WIDTH, n - 1u) * k;
    EACH_COLUMN(PLACE_B, 0)
#endif

    COLUMNS sums[TM * NUM_VECTORS];
#define CLEAR(r, v) sums[r * NUM_VECTORS + v] = COLUMNS(0.0);
#define CLEAR_VECTOR(v, _) EACH_ROW(CLEAR, v)
    EACH_VECTOR(CLEAR_VECTOR, 0)
    if ((args.flags & CONTINUE) != 0u) {
#define RESUME(r, v) if (r < num_rows) sums[r * NUM_VECTORS + v] = \
        load_columns(args.c, c_start + (row0 + r) * n, col0 + v * (WIDTH * SIZE), n - 1u);
#define RESUME_VECTOR(v, _) EACH_ROW(RESUME, v)
        EACH_VECTOR(RESUME_VECTOR, 0)
    }

#define MULTIPLY(r, v) sums[r * NUM_VECTORS + v] = fma(COLUMNS(a_value[r]), b_value, sums[r * NUM_VECTORS + v]);
#define SPREAD(r, kk) a_value[r] = \
        subgroupBroadcast(a[A_VECTOR(r, kk) / SIZE][A_COMPONENT(r, kk)], A_VECTOR(r, kk) % SIZE);
#if !TB
#define MULTIPLY_VECTOR(v, kk) { \
        const COLUMNS b_value = load_columns(args.b, b_start + kk * n, col0 + v * (WIDTH * SIZE), n - 1u); \
        EACH_ROW(MULTIPLY, v) }
#define STEP(kk, _) EACH_ROW(SPREAD, kk) EACH_VECTOR(MULTIPLY_VECTOR, kk)
#else
#define LOAD_B(c, kk) b[c] = load_row(args.b, b_start + b_index[c] + kk);
#if TN == 1
#define B_COLUMNS(v, kk) b[0][kk % 4]
#else
#define B_COLUMNS(v, kk) vec4(b[4 * v][kk % 4], b[4 * v + 1][kk % 4], b[4 * v + 2][kk % 4], b[4 * v + 3][kk % 4])
#endif
#define MULTIPLY_VECTOR(v, kk) { const COLUMNS b_value = B_COLUMNS(v, kk); EACH_ROW(MULTIPLY, v) }
#define STEP(kk, _) if (kk % 4 == 0) { EACH_COLUMN(LOAD_B, kk) } \
        EACH_ROW(SPREAD, kk) EACH_VECTOR(MULTIPLY_VECTOR, kk)
    vec4 b[TN];
#endif
    float a_value[TM];
    vec4 a[A_VECTORS];
    const uint num_blocks = (args.k_end - args.k_begin) / BLOCK;
    for (uint block = 0; block < num_blocks; ++block) {
        EACH_A(LOAD_A, 0)
        EACH_STEP(STEP, 0)
        a_start += A_STEP;
        b_start += B_STEP;
    }
    // What is left of k, one by one: row r's value on lane r % SIZE.
    for (uint i = args.k_begin + num_blocks * BLOCK; i < args.k_end; ++i) {
#if TA
#define LOAD_TAIL(j, _) a[j].x = args.a.v[a_start + min(row0 + j * SIZE + lane, m - 1u)];
        EACH_A(LOAD_TAIL, 0)
        a_start += m;
#else
#define LOAD_TAIL(j, _) a[j].x = args.a.v[a_start + min(row0 + j * SIZE + lane, m - 1u) * k];
        EACH_A(LOAD_TAIL, 0)
        a_start += 1u;
#endif
#define SPREAD_TAIL(r, _) a_value[r] = subgroupBroadcast(a[r / SIZE].x, r % SIZE);
        EACH_ROW(SPREAD_TAIL, 0)
#if TB
#define LOAD_B_TAIL(c, _) b[c].x = args.b.v[b_start + b_index[c]];
        EACH_COLUMN(LOAD_B_TAIL, 0)
#define TAIL_VECTOR(v, _) { const COLUMNS b_value = B_COLUMNS(v, 0); EACH_ROW(MULTIPLY, v) }
        EACH_VECTOR(TAIL_VECTOR, 0)
        b_start += 1u;
#else
        EACH_VECTOR(MULTIPLY_VECTOR, 0)
        b_start += n;
#endif
    }

#define STORE(r, v) if (r < num_rows) \
        store_columns(args.c, c_start + (row0 + r) * n, col0 + v * (WIDTH * SIZE), n, sums[r * NUM_VECTORS + v]);
#define STORE_VECTOR(v, _) EACH_ROW(STORE, v)
    EACH_VECTOR(STORE_VECTOR, 0)

    // The epilogue goes over what this lane has just stored, in a loop: written out it would be thousands of instructions.
    if (args.activation == 0u && (args.flags & (BIAS | RESIDUAL)) == 0u) return;
    for (uint r = 0; r < num_rows; ++r) {
        const uint start = c_start + (row0 + r) * n;
        for (uint column = col0; column < min(n, col0 + TN * SIZE); column += WIDTH * SIZE) {
            COLUMNS value = load_columns(args.c, start, column, n - 1u);
            if ((args.flags & BIAS) != 0u) value += load_columns(args.bias, 0u, column, n - 1u);
            value = activate(value, args.activation);
            if ((args.flags & RESIDUAL) != 0u) value = load_columns(args.residual, start, column, n - 1u) + value;
            store_columns(args.c, start, column, n, value);
        }
    }
}
