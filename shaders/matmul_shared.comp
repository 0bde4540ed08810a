// C = A B by tiles of TILE_M x TILE_N a workgroup, A and B staged in shared memory DEPTH values of k at a time, double
// buffered: while one pair of tiles is multiplied the next is on its way, and there is one barrier a round. Strides and
// bounds are those of matmul.comp, and so is the epilogue, whose text comes first. Sizes: engine/workgroup_tile.py.
//
// MATRIX 0: each invocation holds ROWS x COLUMNS sums, every element one fma chain over k: the bits of matmul.comp.
// MATRIX 1: subgroups multiply fragments by cooperative matrices (SPV_KHR_cooperative_matrix) with float32 sums, whose
// order within a fragment is the device's own. WAVES subgroups, WAVES_N of them along the columns. BFLOAT: float16_t
// stands for bfloat16 (a pass over the SPIR-V makes it one), so nothing may be done with it but to move its bits.
// ROUND(x) takes an operand to the precision that was asked for, float32 or a shorter one.

#if !WITH_EXPR // expr.glsl, where an epilogue brings it, has these
#include "float_bits.glsl"
float round_to_half(float x) { return uintBitsToFloat(float_from_half(half_from_float(floatBitsToUint(x)))); }
float round_to_bfloat(float x) { return uintBitsToFloat(bfloat_from_float(floatBitsToUint(x)) << 16); }
#endif

// SwiftShader takes minutes to unroll these loops; it gets them as they are.
#if ROLLED
#define UNROLL
#else
#define UNROLL [[unroll]]
#endif
#define PITCH_A (TILE_M + PADDING) // of a row in shared memory
#define PITCH_B (TILE_N + PADDING)
// An invocation loads four neighbouring rows of A, or columns of B, at one k: of such quads so many
#define SHARE_A (TILE_M * DEPTH / 4u / INVOCATIONS)
#define SHARE_B (TILE_N * DEPTH / 4u / INVOCATIONS)

#if MATRIX
shared float16_t a_tiles[2u * DEPTH * PITCH_A], b_tiles[2u * DEPTH * PITCH_B];
#if BFLOAT
uint shorter(float x) { return bfloat_from_float(floatBitsToUint(x)); }
#else
uint shorter(float x) { return half_from_float(floatBitsToUint(x)); }
#endif
f16vec4 staged(vec4 x) {
    return f16vec4(unpackFloat2x16(shorter(x[0]) | shorter(x[1]) << 16), unpackFloat2x16(shorter(x[2]) | shorter(x[3]) << 16));
}
#define PUT(tiles, at, x) { \
        const f16vec4 kept = staged(x); \
        tiles[at] = kept[0]; tiles[(at) + 1u] = kept[1]; tiles[(at) + 2u] = kept[2]; tiles[(at) + 3u] = kept[3]; }
shared float fragment_sums[WAVES * FRAGMENT_M * FRAGMENT_N]; // one fragment of each subgroup
#else
shared vec4 a_tiles[2u * DEPTH * PITCH_A / 4u], b_tiles[2u * DEPTH * PITCH_B / 4u];
vec4 staged(vec4 x) { return vec4(ROUND(x[0]), ROUND(x[1]), ROUND(x[2]), ROUND(x[3])); }
#define PUT(tiles, at, x) tiles[(at) / 4u] = staged(x);
#define LANES (TILE_N / COLUMNS) // invocations along the columns
#endif

void main() {
    const uint id = gl_LocalInvocationIndex;
    const uint tile = group_index(), tiles = args.tiles_m * args.tiles_n;
    const uint batch = tile / tiles;
    if (batch >= args.batch) return; // the same for a whole workgroup
    const uint row0 = tile % tiles % args.tiles_m * TILE_M, col0 = tile % tiles / args.tiles_m * TILE_N;
    const uint a_start = batch * args.batch_a, b_start = batch * args.batch_b, c_start = batch * args.m * args.n;
    // Neighbouring invocations load neighbouring elements, whichever way they lie.
    const bool a_by_k = args.a_k == 1u, b_by_k = args.b_k == 1u;

    vec4 a_next[SHARE_A], b_next[SHARE_B];
#define PLACE(by_k, i, size, k_of, other) \
        const uint e = id + (i) * INVOCATIONS; \
        const uint k_of = by_k ? e % DEPTH : e / (size / 4u), other = 4u * (by_k ? e / DEPTH : e % (size / 4u));
#define A_AT(r) args.a.v[a_start + min(row0 + row + r, args.m - 1u) * args.a_row + k * args.a_k]
#define B_AT(r) args.b.v[b_start + min(col0 + column + r, args.n - 1u) * args.b_col + k * args.b_k]
// Beyond k an operand pair counts as -0 * 0, which leaves any sum as it is; beyond m and n nothing is stored.
#define FETCH_A(i, begin) { \
        PLACE(a_by_k, i, TILE_M, kk, row) \
        const uint k = min((begin) + kk, args.k - 1u); \
        const vec4 x = vec4(A_AT(0u), A_AT(1u), A_AT(2u), A_AT(3u)); \
        a_next[i] = (begin) + kk < args.k ? x : vec4(-0.0); }
#define FETCH_B(i, begin) { \
        PLACE(b_by_k, i, TILE_N, kk, column) \
        const uint k = min((begin) + kk, args.k - 1u); \
        const vec4 x = vec4(B_AT(0u), B_AT(1u), B_AT(2u), B_AT(3u)); \
        b_next[i] = (begin) + kk < args.k ? x : vec4(0.0); }
#define FETCH(begin) { \
        UNROLL for (uint i = 0; i < SHARE_A; ++i) FETCH_A(i, begin) \
        UNROLL for (uint i = 0; i < SHARE_B; ++i) FETCH_B(i, begin) }
#define KEEP_A(i, side) { \
        PLACE(a_by_k, i, TILE_M, kk, row) \
        PUT(a_tiles, ((side) * DEPTH + kk) * PITCH_A + row, a_next[i]) }
#define KEEP_B(i, side) { \
        PLACE(b_by_k, i, TILE_N, kk, column) \
        PUT(b_tiles, ((side) * DEPTH + kk) * PITCH_B + column, b_next[i]) }
#define KEEP(side) { \
        UNROLL for (uint i = 0; i < SHARE_A; ++i) KEEP_A(i, side) \
        UNROLL for (uint i = 0; i < SHARE_B; ++i) KEEP_B(i, side) }

    const uint rounds = (args.k + DEPTH - 1u) / DEPTH;
#if MATRIX
    const uint wave_row = gl_SubgroupID / WAVES_N * (FRAGMENT_M * FRAGMENTS_M);
    const uint wave_col = gl_SubgroupID % WAVES_N * (FRAGMENT_N * FRAGMENTS_N);
    coopmat<float, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_N, gl_MatrixUseAccumulator> sums[FRAGMENTS_M * FRAGMENTS_N];
    UNROLL for (uint i = 0; i < FRAGMENTS_M * FRAGMENTS_N; ++i)
        sums[i] = coopmat<float, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_N, gl_MatrixUseAccumulator>(0.0);
#else
    const uint my_row = id / LANES * ROWS, my_col = id % LANES * 4u; // four columns, and four more beyond all lanes'
#define ROW_OF(i) (row0 + my_row + (i) / COLUMNS)
#define COLUMN_OF(i) (col0 + my_col + (i) % COLUMNS / 4u * (4u * LANES) + (i) % 4u)
    float sums[ROWS * COLUMNS];
    UNROLL for (uint i = 0; i < ROWS * COLUMNS; ++i) {
        sums[i] = 0.0;
#if RESUMES
        sums[i] = args.c.v[c_start + min(ROW_OF(i), args.m - 1u) * args.c_row + min(COLUMN_OF(i), args.n - 1u) * args.c_col];
#endif
    }
#endif
    if (rounds > 0u) {
        FETCH(0u)
        KEEP(0u)
    }
    barrier();
    for (uint round = 0; round < rounds; ++round) {
        const uint side = round & 1u;
        const bool more = round + 1u < rounds;
        if (more) FETCH((round + 1u) * DEPTH)
#if MATRIX
        UNROLL for (uint kk = 0; kk < DEPTH; kk += FRAGMENT_K) {
            const uint a_at = (side * DEPTH + kk) * PITCH_A + wave_row, b_at = (side * DEPTH + kk) * PITCH_B + wave_col;
            coopmat<float16_t, gl_ScopeSubgroup, FRAGMENT_K, FRAGMENT_N, gl_MatrixUseB> b[FRAGMENTS_N];
            UNROLL for (uint j = 0; j < FRAGMENTS_N; ++j)
                coopMatLoad(b[j], b_tiles, b_at + j * FRAGMENT_N, PITCH_B, gl_CooperativeMatrixLayoutRowMajor);
            UNROLL for (uint i = 0; i < FRAGMENTS_M; ++i) {
                coopmat<float16_t, gl_ScopeSubgroup, FRAGMENT_M, FRAGMENT_K, gl_MatrixUseA> a;
                coopMatLoad(a, a_tiles, a_at + i * FRAGMENT_M, PITCH_A, gl_CooperativeMatrixLayoutColumnMajor);
                UNROLL for (uint j = 0; j < FRAGMENTS_N; ++j)
                    sums[i * FRAGMENTS_N + j] = coopMatMulAdd(a, b[j], sums[i * FRAGMENTS_N + j]);
            }
        }
#else
        for (uint kk = 0; kk < DEPTH; ++kk) {
            const uint a_at = (side * DEPTH + kk) * PITCH_A + my_row, b_at = (side * DEPTH + kk) * PITCH_B + my_col;
            vec4 a[ROWS / 4], b[COLUMNS / 4];
            UNROLL for (uint i = 0; i < ROWS / 4; ++i) a[i] = a_tiles[a_at / 4u + i];
            UNROLL for (uint j = 0; j < COLUMNS / 4; ++j) b[j] = b_tiles[b_at / 4u + j * LANES];
            UNROLL for (uint i = 0; i < ROWS * COLUMNS; ++i)
                sums[i] = fma(a[i / COLUMNS / 4u][i / COLUMNS % 4u], b[i % COLUMNS / 4u][i % 4u], sums[i]);
        }
#endif
        if (more) KEEP(1u - side)
        barrier();
    }

    // Sums are stored first; the epilogue goes over what this invocation has stored, in a loop, as in matmul.comp.
#if MATRIX
    const uint lane = gl_SubgroupInvocationID, fragment_start = gl_SubgroupID * (FRAGMENT_M * FRAGMENT_N);
    const uint row1 = row0 + wave_row, col1 = col0 + wave_col;
    UNROLL for (uint f = 0; f < FRAGMENTS_M * FRAGMENTS_N; ++f) {
        coopMatStore(sums[f], fragment_sums, fragment_start, FRAGMENT_N, gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        for (uint e = lane; e < FRAGMENT_M * FRAGMENT_N; e += SIZE) {
            const uint row = row1 + f / FRAGMENTS_N * FRAGMENT_M + e / FRAGMENT_N;
            const uint column = col1 + f % FRAGMENTS_N * FRAGMENT_N + e % FRAGMENT_N;
            if (row < args.m && column < args.n) {
                const uint at = c_start + row * args.c_row + column * args.c_col;
#if RESUMES
                args.c.v[at] = fragment_sums[fragment_start + e] + args.c.v[at];
#else
                args.c.v[at] = fragment_sums[fragment_start + e];
#endif
            }
        }
        barrier();
    }
    if (!has_epilogue()) return;
    for (uint f = 0; f < FRAGMENTS_M * FRAGMENTS_N; ++f) {
        for (uint e = lane; e < FRAGMENT_M * FRAGMENT_N; e += SIZE) {
            const uint row = row1 + f / FRAGMENTS_N * FRAGMENT_M + e / FRAGMENT_N;
            const uint column = col1 + f % FRAGMENTS_N * FRAGMENT_N + e % FRAGMENT_N;
            const uint at = c_start + row * args.c_row + column * args.c_col;
            if (row < args.m && column < args.n) args.c.v[at] = finish(args.c.v[at], c_start, row, column);
        }
    }
#else
    UNROLL for (uint i = 0; i < ROWS * COLUMNS; ++i) {
        const uint row = ROW_OF(i), column = COLUMN_OF(i);
        if (row < args.m && column < args.n) args.c.v[c_start + row * args.c_row + column * args.c_col] = sums[i];
    }
    if (!has_epilogue()) return;
    for (uint i = 0; i < ROWS * COLUMNS; ++i) {
        const uint row = ROW_OF(i), column = COLUMN_OF(i);
        const uint at = c_start + row * args.c_row + column * args.c_col;
        if (row < args.m && column < args.n) args.c.v[at] = finish(args.c.v[at], c_start, row, column);
    }
#endif
}
