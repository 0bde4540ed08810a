// C = A B, float32, any shape, any transposition, from registers alone. A subgroup computes a tile of TM rows and
// SIZE * TN columns of C; each lane holds TM x TN sums. A lane loads its own columns of B; a row's value of A is loaded
// by one lane and spread to all, so that one load serves many multiplications: no shared memory, no barrier.
//
// Every element of C is one chain fma(a[k], b[k], sum) over k = 0, 1, 2, ... from 0, or with RESUMES from what C holds,
// whatever the tile: equal bits. With SPLIT > 1 the subgroups of a workgroup take one contiguous part of k each, and
// the sums of part 1, 2, ... are added to those of part 0 in this order.
//
// Where an element lies is told by strides, so the four transpositions, and lanes along the rows of C instead of its
// columns, are one kernel: a_row, a_k, b_col, b_k, c_row, c_col count elements. Rows and columns beyond the matrix are
// clamped to the last one when loading and not stored.
//
// PAIR_A, PAIR_B: how a lane reads two neighbouring elements as one 64-bit word: along k (1), or along the rows of A and
// the columns of B (2); both 0: one by one. In pairs k is a multiple of UNROLL_K, and strides, sizes and addresses fit.
//
// PROLOGUE: one operand goes through `prologue` on the way in; PROLOGUE_OF_B: that is B, not A. Own is what its own index
// (a row of A, a column of B) decides, OfK what k decides. Only for products without a batch.
//
// SIZE: lanes of a subgroup. TM, TN: the tile of a lane. UNROLL_K: values of k in a round. A_LOADS: loads that bring TM
// rows to SIZE lanes. SPREAD_SHUFFLE, SPREAD_BROADCAST: how a value reaches all lanes; neither: all lanes load it.
// EACH_ROW(F, x), EACH_COLUMN(F, x), EACH_A(F, x), EACH_K(F, x): F(0, x) F(1, x) ..., as the driver likes it best: an
// unrolled loop, or written out. GROUP: rows of tiles that are walked together, so that their A stays in cache while the
// columns of B go by; 0: all. BLOCK: columns that a round multiplies at a time, for a CPU that spills registers; 0: all.
// Before this text come `prologue`, `has_epilogue` and `finish`, which are printed from
// expressions: engine/ops/matmul_parts.py.

#if PROLOGUE
#define NUM_PRODUCTS 1u
#define PRODUCT_A 0u
#define PRODUCT_B 0u
#else
#define NUM_PRODUCTS args.batch
#define PRODUCT_A args.batch_a
#define PRODUCT_B args.batch_b
#endif

#if SPLIT > 1
shared float partial[(SPLIT - 1) * TM * TN * SIZE];
#endif

#if PAIR_A
layout(buffer_reference, std430, buffer_reference_align = 8) buffer U64 { uint64_t v[]; };
#define PLACE uint64_t
// Addresses of 64 bits are added up part by part: lavapipe does the part that a round does not change outside the loop.
uint64_t bytes(uint elements) { return 4ul * uint64_t(elements); }
vec2 load_pair(uint64_t at) { return uintBitsToFloat(unpackUint2x32(U64(at).v[0])); }
#define AT(operand, element) (uint64_t(operand) + bytes(element))
#else
#define PLACE uint
#define AT(operand, element) (element)
#endif
#if PAIR_B == 2
#define COLUMN(w) (col0 + (w) / 2u * (2u * SIZE) + (w) % 2u)
#else
#define COLUMN(w) (col0 + (w) * SIZE)
#endif

#if PAIR_A == 2
#define SPREAD(r, u) subgroupShuffle(a[((r) / (2 * SIZE) * 2 + (r) % 2) * UNROLL_K + u], (r) / 2 % SIZE)
#elif defined SPREAD_SHUFFLE
#define SPREAD(r, u) subgroupShuffle(a[(r) / SIZE * UNROLL_K + u], (r) % SIZE)
#elif defined SPREAD_BROADCAST
#define SPREAD(r, u) subgroupBroadcast(a[(r) / SIZE * UNROLL_K + u], (r) % SIZE)
#else
#define SPREAD(r, u) a[(r) * UNROLL_K + u]
#endif

void main() {
    const uint lane = gl_SubgroupInvocationID;
#if SPLIT > 1
    const uint tile = group_index();
    const uint share = ((args.k + SPLIT - 1u) / SPLIT + 3u) / 4u * 4u; // whole rounds of every unrolling, 1, 2 or 4
    const uint k_begin = min(gl_SubgroupID * share, args.k), k_end = min(k_begin + share, args.k);
    const bool resumes = gl_SubgroupID == 0u;
#else
    const uint tile = group_index() * gl_NumSubgroups + gl_SubgroupID;
    const uint k_begin = 0u, k_end = args.k;
    const bool resumes = true;
#endif
    const uint tiles = args.tiles_m * args.tiles_n;
    const uint batch = tile / tiles;
    if (batch >= NUM_PRODUCTS) return;
    const uint place = tile % tiles;
#if GROUP
    const uint group = place / (GROUP * args.tiles_n), in_group = place % (GROUP * args.tiles_n);
    const uint height = min(uint(GROUP), args.tiles_m - group * GROUP);
    const uint tile_row = group * GROUP + in_group % height, tile_column = in_group / height;
#else
    const uint tile_row = place % args.tiles_m, tile_column = place / args.tiles_m;
#endif
    const uint row0 = tile_row * TM;
    const uint col0 = tile_column * (TN * SIZE) + (PAIR_B == 2 ? 2u : 1u) * lane;
    const uint c_start = batch * args.m * args.n;

    PLACE a_at[A_LOADS], b_at[TN];
    uint c_at[TN];
#if PAIR_A == 2
#define PLACE_A(i, _) if ((i) % 2 == 0) \
        a_at[i] = AT(args.a, batch * PRODUCT_A + min(row0 + (i) * SIZE + 2 * lane, args.m - 2u));
#elif defined SPREAD_SHUFFLE || defined SPREAD_BROADCAST
#define PLACE_A(i, _) a_at[i] = AT(args.a, batch * PRODUCT_A + min(row0 + (i) * SIZE + lane, args.m - 1u) * args.a_row);
#else
#define PLACE_A(i, _) a_at[i] = AT(args.a, batch * PRODUCT_A + min(row0 + (i), args.m - 1u) * args.a_row);
#endif
#if PAIR_B == 2
#define PLACE_B(w, _) if ((w) % 2 == 0) b_at[w] = AT(args.b, batch * PRODUCT_B + min(COLUMN(w), args.n - 2u));
#else
#define PLACE_B(w, _) b_at[w] = AT(args.b, batch * PRODUCT_B + min(COLUMN(w), args.n - 1u) * args.b_col);
#endif
#define PLACE_C(w, _) c_at[w] = c_start + row0 * args.c_row + COLUMN(w) * args.c_col;
    EACH_A(PLACE_A, 0)
    EACH_COLUMN(PLACE_B, 0)
    EACH_COLUMN(PLACE_C, 0)

#if PROLOGUE && PROLOGUE_OF_B
    Own own[TN];
#define PLACE_OWN(w, _) own[w] = own_at(min(COLUMN(w), args.n - 1u));
    EACH_COLUMN(PLACE_OWN, 0)
#elif PROLOGUE
    Own own[A_LOADS];
#if PAIR_A == 2
#define PLACE_OWN(i, _) own[i] = own_at(min(row0 + (i) / 2 * (2 * SIZE) + 2 * lane + (i) % 2, args.m - 1u));
#elif defined SPREAD_SHUFFLE || defined SPREAD_BROADCAST
#define PLACE_OWN(i, _) own[i] = own_at(min(row0 + (i) * SIZE + lane, args.m - 1u));
#else
#define PLACE_OWN(i, _) own[i] = own_at(min(row0 + (i), args.m - 1u));
#endif
    EACH_A(PLACE_OWN, 0)
#endif

    const uint num_rows = min(uint(TM), args.m - row0);
    float sums[TM * TN];
#define CLEAR(w, r) sums[(r) * TN + w] = 0.0;
#define CLEAR_ROW(r, _) EACH_COLUMN(CLEAR, r)
    EACH_ROW(CLEAR_ROW, 0)
#if RESUMES
    if (resumes) {
#define RESUME(w, r) sums[(r) * TN + w] = args.c.v[resume_at[w] + min(r, num_rows - 1u) * args.c_row];
#define RESUME_ROW(r, _) EACH_COLUMN(RESUME, r)
#define PLACE_RESUME(w, _) resume_at[w] = c_start + row0 * args.c_row + min(COLUMN(w), args.n - 1u) * args.c_col;
        uint resume_at[TN];
        EACH_COLUMN(PLACE_RESUME, 0)
        EACH_ROW(RESUME_ROW, 0)
    }
#endif

    float a[A_LOADS * UNROLL_K], b[TN * UNROLL_K], spread[UNROLL_K];
#define PUT_PAIR(value, to, first, second) { const vec2 two = value; to[first] = two.x; to[second] = two.y; }
#if PAIR_A == 1
#define LOAD_A(u, i) if ((u) % 2 == 0) \
        PUT_PAIR(load_pair(a_at[i] + (bytes(k) + 4ul * (u))), a, (i) * UNROLL_K + (u), (i) * UNROLL_K + (u) + 1)
#elif PAIR_A == 2
#define LOAD_A(u, i) if ((i) % 2 == 0) \
        PUT_PAIR(load_pair(a_at[i] + bytes((k + (u)) * args.a_k)), a, (i) * UNROLL_K + (u), ((i) + 1) * UNROLL_K + (u))
#else
#define LOAD_A(u, i) { const float x = args.a.v[a_at[i] + INDEX(u) * args.a_k]; a[(i) * UNROLL_K + u] = VALID(u, x, -0.0); }
#endif
#if PAIR_B == 1
#define LOAD_B(u, w) if ((u) % 2 == 0) \
        PUT_PAIR(load_pair(b_at[w] + (bytes(k) + 4ul * (u))), b, (w) * UNROLL_K + (u), (w) * UNROLL_K + (u) + 1)
#elif PAIR_B == 2
#define LOAD_B(u, w) if ((w) % 2 == 0) \
        PUT_PAIR(load_pair(b_at[w] + bytes((k + (u)) * args.b_k)), b, (w) * UNROLL_K + (u), ((w) + 1) * UNROLL_K + (u))
#else
#define LOAD_B(u, w) { const float x = args.b.v[b_at[w] + INDEX(u) * args.b_k]; b[(w) * UNROLL_K + u] = VALID(u, x, 0.0); }
#endif
#define LOADS_A(i, _) EACH_K(LOAD_A, i)
#define LOADS_B(w, _) EACH_K(LOAD_B, w)
#if UNROLL_K == 1 || PAIR_A
#define INDEX(u) (k + (u))
#define VALID(u, x, other) x
#else
// What a round reaches beyond the last k counts as -0 * 0, which leaves any sum as it is.
#define INDEX(u) (k + min(u, last))
#define VALID(u, x, other) (u) <= last ? x : (other)
#endif
#if PROLOGUE && PROLOGUE_OF_B
#define PREPARE(w, u) b[(w) * UNROLL_K + u] = VALID(u, prologue(b[(w) * UNROLL_K + u], own[w], of_k), 0.0);
#define PREPARE_K(u, _) { const OfK of_k = ofk_at(INDEX(u)); EACH_COLUMN(PREPARE, u) }
#elif PROLOGUE
#define PREPARE(i, u) a[(i) * UNROLL_K + u] = VALID(u, prologue(a[(i) * UNROLL_K + u], own[i], of_k), -0.0);
#define PREPARE_K(u, _) { const OfK of_k = ofk_at(INDEX(u)); EACH_A(PREPARE, u) }
#endif
#define TAKE(u, r) spread[u] = SPREAD(r, u);
#define MULTIPLY(u, at) sums[at] = fma(spread[u], b[(at) % TN * UNROLL_K + u], sums[at]);
#define MULTIPLY_COLUMN(w, r) EACH_K(MULTIPLY, (r) * TN + (w))
#define MULTIPLY_ROW(r, _) EACH_K(TAKE, r) EACH_COLUMN(MULTIPLY_COLUMN, r)
#if BLOCK
// Sums and columns of B are more than there are registers. In blocks of columns B stays in them while all rows go by, and
// what the next block and the next rows need is loaded one by one between the multiplications, which hide it.
#define SLOT (PAIR_A == 2 ? 2 : 1)
#define ROWS_OF_SLOT (SLOT * SIZE)
#define PARTS (BLOCK * UNROLL_K)
#define EVERY (TM > PARTS ? TM / PARTS : 1)
#define AT_ONCE ((PARTS + TM - 1) / TM)
#define LOAD_PART(block, part) LOAD_B((part) % UNROLL_K, (block) * BLOCK + (part) / UNROLL_K)
#define LOAD_AHEAD(block, r) \
        if (block == 0 && r % ROWS_OF_SLOT == ROWS_OF_SLOT / 2 && (r / ROWS_OF_SLOT + 1) * SLOT < A_LOADS) { \
            LOADS_A((r / ROWS_OF_SLOT + 1) * SLOT, 0) \
        } \
        if (block + 1 < TN / BLOCK && r % EVERY == 0 && r / EVERY * AT_ONCE < PARTS) { \
            [[unroll]] for (uint i = 0; i < AT_ONCE; ++i) { LOAD_PART(block + 1, r / EVERY * AT_ONCE + i) } \
        }
#endif
    uint touched = 0u;
// Rows of an operand that lies across k are pages apart, where no hardware prefetches, and a lane's loads are too far apart
// to overlap when they miss. So the cache lines of BATCH rows are touched together first, a lane a line, by TOUCH_A and
// TOUCH_B loads: 1.6 times as fast for A stored [K, M] at 1,024.
#define LINES(width) (((width) + 15u) / 16u)
#define FIRST_LINE(operand, start, first, size, width, step) \
        AT(operand, start + lane / LINES(width) * step + min(first + lane % LINES(width) * 16u, size - 1u))
#define TOUCH(first_line, width, step, loads) { \
        const uint64_t stride = bytes(SIZE / LINES(width) * step); \
        uint64_t line = first_line + bytes(k * step); \
        [[dont_unroll]] for (uint part = 0; part < loads; part += 2) { \
            touched ^= floatBitsToUint(F32(line).v[0]) ^ floatBitsToUint(F32(line + stride).v[0]); \
            line += 2 * stride; \
        } }
#if TOUCH_A
    const uint64_t a_line = FIRST_LINE(args.a, batch * PRODUCT_A, row0, args.m, TM, args.a_k);
#endif
#if TOUCH_B
    const uint64_t b_line = FIRST_LINE(args.b, batch * PRODUCT_B, col0 - 2u * lane, args.n, TN * SIZE, args.b_k);
#endif
    for (uint k = k_begin; k < k_end; k += UNROLL_K) {
#if TOUCH_A || TOUCH_B
        if (k % BATCH == 0u && k + BATCH <= k_end) {
#if TOUCH_A
            TOUCH(a_line, TM, args.a_k, TOUCH_A)
#endif
#if TOUCH_B
            TOUCH(b_line, TN * SIZE, args.b_k, TOUCH_B)
#endif
        }
#endif
#if UNROLL_K > 1 && !PAIR_A
        const uint last = k_end - 1u - k;
#endif
#if BLOCK && !PROLOGUE
        LOADS_A(0, 0)
        [[unroll]] for (uint part = 0; part < PARTS; ++part) { LOAD_PART(0, part) }
#else
        EACH_A(LOADS_A, 0)
        EACH_COLUMN(LOADS_B, 0)
#endif
#if PROLOGUE
        EACH_K(PREPARE_K, 0)
#endif
#if BLOCK
        [[unroll]] for (uint block = 0; block < TN / BLOCK; ++block) {
            [[unroll]] for (uint r = 0; r < TM; ++r) {
#if !PROLOGUE
                LOAD_AHEAD(block, r)
#endif
                EACH_K(TAKE, r)
                [[unroll]] for (uint w = 0; w < BLOCK; ++w) { EACH_K(MULTIPLY, r * TN + block * BLOCK + w) }
            }
        }
#else
        EACH_ROW(MULTIPLY_ROW, 0)
#endif
    }
    if (touched == 1u && args.flags == 0xFFFFFFFFu) return; // never; without it the loads would be left out

#if SPLIT > 1
#define PARTIAL(w, r) (gl_SubgroupID - 1u) * (TM * TN * SIZE) + ((r) * TN + (w)) * SIZE + lane
#define HAND_OVER(w, r) partial[PARTIAL(w, r)] = sums[(r) * TN + w];
#define HAND_OVER_ROW(r, _) EACH_COLUMN(HAND_OVER, r)
    if (gl_SubgroupID != 0u) { EACH_ROW(HAND_OVER_ROW, 0) }
    barrier();
    if (gl_SubgroupID != 0u) return;
    for (uint part = 0; part < SPLIT - 1; ++part) {
#define ADD_PART(w, r) sums[(r) * TN + w] += partial[part * (TM * TN * SIZE) + ((r) * TN + (w)) * SIZE + lane];
#define ADD_PART_ROW(r, _) EACH_COLUMN(ADD_PART, r)
        EACH_ROW(ADD_PART_ROW, 0)
    }
#endif

#define STORE(w, r) if ((r) < num_rows && COLUMN(w) < args.n) \
        args.c.v[c_at[w] + (r) * args.c_row] = sums[(r) * TN + w];
#define STORE_ROW(r, _) EACH_COLUMN(STORE, r)
    EACH_ROW(STORE_ROW, 0)

    // The epilogue goes over what this lane has just stored, in a loop: written out it would be thousands of instructions.
    if (!has_epilogue()) return;
    for (uint w = 0; w < TN; ++w) {
        const uint column = COLUMN(w);
        if (column >= args.n) break;
        for (uint r = 0; r < num_rows; ++r) {
            const uint at = c_start + (row0 + r) * args.c_row + column * args.c_col;
            args.c.v[at] = finish(args.c.v[at], c_start, row0 + r, column);
        }
    }
}
