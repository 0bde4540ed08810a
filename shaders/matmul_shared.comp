// C = A B by tiles of 64 x 64 a workgroup of 128 invocations, A and B staged in shared memory 16 values of k at a time,
// double buffered: while one pair of tiles is multiplied the next is on its way, and there is one barrier a round.
// Strides and bounds are those of matmul.comp, and so is the epilogue, whose text comes first.
//
// MATRIX 0: each invocation holds 8 x 4 sums, every element one fma chain over k: the bits of matmul.comp. ROUND(x)
// takes an operand to the precision that was asked for, float32 or a shorter one.
// MATRIX 1: subgroups multiply fragments of 16 x 16 x 16 by cooperative matrices (SPV_KHR_cooperative_matrix), float16
// operands and float32 sums, whose order within a fragment is the device's own. WAVES_N: subgroups along the columns.

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
#define TILE 64u
#define DEPTH 16u
#define PITCH 72u // of a row in shared memory: rows start in different banks, and on 16 bytes
#define SHARE (TILE * DEPTH / 128u)

#if MATRIX
#define ELEMENT float16_t
#define STAGED(value) unpackFloat2x16(half_from_float(floatBitsToUint(value))).x
shared float sums_of_tile[TILE * TILE];
#else
#define ELEMENT float
#define STAGED(x) ROUND(x)
#endif

shared ELEMENT a_tiles[2u * DEPTH * PITCH], b_tiles[2u * DEPTH * PITCH];

void main() {
    const uint id = gl_LocalInvocationIndex;
    const uint tile = group_index(), tiles = args.tiles_m * args.tiles_n;
    const uint batch = tile / tiles;
    if (batch >= args.batch) return; // the same for a whole workgroup
    const uint row0 = tile % tiles % args.tiles_m * TILE, col0 = tile % tiles / args.tiles_m * TILE;
    const uint a_start = batch * args.batch_a, b_start = batch * args.batch_b, c_start = batch * args.m * args.n;
    // Neighbouring invocations load neighbouring elements, whichever way they lie.
    const bool a_by_k = args.a_k == 1u, b_by_k = args.b_k == 1u;

    float a_next[SHARE], b_next[SHARE];
#define PLACE(by_k, i, k_of, other) \
        const uint e = id + (i) * 128u; \
        const uint k_of = by_k ? e % DEPTH : e / TILE, other = by_k ? e / DEPTH : e % TILE;
// Beyond k an operand pair counts as -0 * 0, which leaves any sum as it is; beyond m and n nothing is stored.
#define FETCH(i, begin) { { \
        PLACE(a_by_k, i, a_kk, row) \
        const uint k_a = min((begin) + a_kk, args.k - 1u); \
        const float x = args.a.v[a_start + min(row0 + row, args.m - 1u) * args.a_row + k_a * args.a_k]; \
        a_next[i] = (begin) + a_kk < args.k ? x : -0.0; } \
    { \
        PLACE(b_by_k, i, b_kk, column) \
        const uint k_b = min((begin) + b_kk, args.k - 1u); \
        const float x = args.b.v[b_start + min(col0 + column, args.n - 1u) * args.b_col + k_b * args.b_k]; \
        b_next[i] = (begin) + b_kk < args.k ? x : 0.0; } }
#define KEEP(i, side) { { \
        PLACE(a_by_k, i, a_kk, row) \
        a_tiles[((side) * DEPTH + a_kk) * PITCH + row] = STAGED(a_next[i]); } \
    { \
        PLACE(b_by_k, i, b_kk, column) \
        b_tiles[((side) * DEPTH + b_kk) * PITCH + column] = STAGED(b_next[i]); } }

    const uint rounds = (args.k + DEPTH - 1u) / DEPTH;
#if MATRIX
    const uint wave_row = gl_SubgroupID / WAVES_N * (16u * FRAGMENTS_M), wave_col = gl_SubgroupID % WAVES_N * (16u * FRAGMENTS_N);
    coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> sums[FRAGMENTS_M * FRAGMENTS_N];
    UNROLL for (uint i = 0; i < FRAGMENTS_M * FRAGMENTS_N; ++i)
        sums[i] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
#else
    const uint my_row = id / 16u * 8u, my_col = id % 16u; // columns my_col + 16 j: no two in one bank
    float sums[32];
    UNROLL for (uint i = 0; i < 32; ++i) {
        sums[i] = 0.0;
#if RESUMES
        const uint row = row0 + my_row + i / 4, column = col0 + my_col + i % 4 * 16;
        sums[i] = args.c.v[c_start + min(row, args.m - 1u) * args.c_row + min(column, args.n - 1u) * args.c_col];
#endif
    }
#endif
    if (rounds > 0u) {
        UNROLL for (uint i = 0; i < SHARE; ++i) FETCH(i, 0u)
        UNROLL for (uint i = 0; i < SHARE; ++i) KEEP(i, 0u)
    }
    barrier();
    for (uint round = 0; round < rounds; ++round) {
        const uint side = round & 1u, begin = (round + 1u) * DEPTH;
        const bool more = round + 1u < rounds;
        if (more) {
            UNROLL for (uint i = 0; i < SHARE; ++i) FETCH(i, begin)
        }
#if MATRIX
        coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b[FRAGMENTS_N];
        UNROLL for (uint j = 0; j < FRAGMENTS_N; ++j)
            coopMatLoad(b[j], b_tiles, side * DEPTH * PITCH + wave_col + j * 16u, PITCH, gl_CooperativeMatrixLayoutRowMajor);
        UNROLL for (uint i = 0; i < FRAGMENTS_M; ++i) {
            coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a;
            coopMatLoad(a, a_tiles, side * DEPTH * PITCH + wave_row + i * 16u, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            UNROLL for (uint j = 0; j < FRAGMENTS_N; ++j)
                sums[i * FRAGMENTS_N + j] = coopMatMulAdd(a, b[j], sums[i * FRAGMENTS_N + j]);
        }
#else
        for (uint kk = 0; kk < DEPTH; ++kk) {
            const uint at = (side * DEPTH + kk) * PITCH;
            float a[8], b[4];
            UNROLL for (uint i = 0; i < 8; ++i) a[i] = a_tiles[at + my_row + i];
            UNROLL for (uint j = 0; j < 4; ++j) b[j] = b_tiles[at + my_col + j * 16u];
            UNROLL for (uint i = 0; i < 32; ++i) sums[i] = fma(a[i / 4], b[i % 4], sums[i]);
        }
#endif
        if (more) {
            UNROLL for (uint i = 0; i < SHARE; ++i) KEEP(i, 1u - side)
        }
        barrier();
    }

#if MATRIX
    UNROLL for (uint i = 0; i < FRAGMENTS_M; ++i) {
        UNROLL for (uint j = 0; j < FRAGMENTS_N; ++j)
            coopMatStore(sums[i * FRAGMENTS_N + j], sums_of_tile, (wave_row + i * 16u) * TILE + wave_col + j * 16u, TILE,
                         gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
    for (uint e = id; e < TILE * TILE; e += 128u) {
        const uint row = row0 + e / TILE, column = col0 + e % TILE;
        if (row < args.m && column < args.n) {
            const uint at = c_start + row * args.c_row + column * args.c_col;
            float sum = sums_of_tile[e];
#if RESUMES
            sum += args.c.v[at];
#endif
            args.c.v[at] = finish(sum, c_start, row, column);
        }
    }
#else
    UNROLL for (uint i = 0; i < 32; ++i) {
        const uint row = row0 + my_row + i / 4, column = col0 + my_col + i % 4 * 16;
        if (row < args.m && column < args.n) args.c.v[c_start + row * args.c_row + column * args.c_col] = sums[i];
    }
    // Over what this invocation has just stored, in a loop, as in matmul.comp.
    if (!has_epilogue()) return;
    for (uint i = 0; i < 32; ++i) {
        const uint row = row0 + my_row + i / 4, column = col0 + my_col + i % 4 * 16;
        const uint at = c_start + row * args.c_row + column * args.c_col;
        if (row < args.m && column < args.n) args.c.v[at] = finish(args.c.v[at], c_start, row, column);
    }
#endif
}
