// How a block fold (engine/block_fold.py) goes about its tiles; the kernel's main is printed by engine/block_fold_glsl.py.
//
// SPREAD lanes hold SPREAD * ROWS held rows together and walk over the streamed rows in blocks of BLOCK. Of each row, held
// or streamed, a lane has VECS elements: WIDTH neighbours of every WIDTH * SPREAD dimensions. What belongs to a row (states,
// weights) lies in one lane, its own. The lanes count the rows of others from their own: register i of lane l is of row
// l ^ i. In a product each lane sums up its own dimensions for SPREAD held rows; then the lanes are added up by exchanges
// alone (ADD_HALVES), after which each has the product of its own row. Where streamed rows are added, weights come from
// their lane by OF_ROW: one exchange serves VECS multiplications. WIDTH is a function of head_dim, so that bits do not
// depend on how it is loaded.
#define WIDTH (HEAD_DIM % (2 * SPREAD) == 0 ? 2 : 1)
#define VECS ((HEAD_DIM + WIDTH * SPREAD - 1) / (WIDTH * SPREAD) * WIDTH)
// Where vector c begins, counted from this lane's first dimension; whether this lane's part of it is there at all.
#define DIM(c) ((c) / WIDTH * (WIDTH * SPREAD) + (c) % WIDTH)
#define HAS_DIM(c) (((c) < HEAD_DIM / (WIDTH * SPREAD) * WIDTH ? 0u : my_dim) + DIM(c) < HEAD_DIM)
// ROW(name, at): from here on a row of an argument is meant whose part of this lane begins at `at`. ELEMENT: its vector c.
// LOAD: that to to[k]; 0 past the last dimension. PAIRS: c and c + 1 as one 64-bit word (shaders/words.glsl says why);
// strides and addresses are then even. SwiftShader works out addresses lane by lane: there a row has a pointer of its own,
// and its elements lie at constants from it.
#if WRITTEN
#define BASE(name) const uvec2 base_##name = uvec2(args.p_##name);
#define ROW(name, at) F32 row_##name; { const uint element = at, low = element << 2; \
        row_##name = F32(base_##name + uvec2(low, (element >> 30) + uint(base_##name.x + low < low))); }
#define ELEMENT(name, c) row_##name.v[DIM(c)]
#define LOAD(to, k, name, c) { \
        const float element = row_##name.v[HAS_DIM(c) ? int(DIM(c)) : -int(my_dim)]; to[k] = HAS_DIM(c) ? element : 0.0; }
#else
#define BASE(name)
#define ROW(name, at) const uint at_##name = at;
#define ELEMENT(name, c) args.p_##name.v[at_##name + DIM(c)]
#if PAIRS
layout(buffer_reference, std430, buffer_reference_align = 8) buffer U64 { uint64_t v[]; };
vec2 load_pair(F32 p, uint i) { return uintBitsToFloat(unpackUint2x32(U64(uvec2(p)).v[i >> 1])); }
#define LOAD(to, k, name, c) if ((c) % 2 == 0) { \
        const vec2 pair = load_pair(args.p_##name, at_##name + DIM(c)); to[k] = pair.x; to[(k) + 1] = pair.y; }
#else
#define LOAD(to, k, name, c) { const float element = args.p_##name.v[HAS_DIM(c) ? at_##name + DIM(c) : at_##name - my_dim]; \
        to[k] = HAS_DIM(c) ? element : 0.0; }
#endif
#endif
// FROM_LANE: what lane i has, for a constant i where text is written out (SwiftShader broadcasts faster than it shuffles,
// lavapipe does not). OF_ROW: what the lane of row my_lane ^ i has; SwiftShader swaps lanes of a quad in one instruction.
#define SHUFFLED(x, i) subgroupShuffle(x, gl_SubgroupSize == SPREAD ? (i) : lane - my_lane + (i))
#if WRITTEN
#define FROM_LANE(x, i) subgroupBroadcast(x, i)
#else
#define FROM_LANE(x, i) SHUFFLED(x, i)
#endif
#if WRITTEN && SPREAD == 4
#define XOR_0(x) x
#define XOR_1(x) subgroupQuadSwapHorizontal(x)
#define XOR_2(x) subgroupQuadSwapVertical(x)
#define XOR_3(x) subgroupQuadSwapDiagonal(x)
#define OF_ROW(x, i) XOR_##i(x)
#else
#define OF_ROW(x, i) subgroupShuffleXor(x, i)
#endif
// A step of adding the lanes up: of the rows that are left, each lane goes on with the half that begins with its own.
#define ADD_HALVES(a, i, half) a[i] += OF_ROW(a[i + half], half);
// A streamed row that some held rows see and others do not is added to all, to the others with weight 0, which makes NaN
// of it where it is not finite. A tile with sums that are not finite is therefore not written but folded again, one row at
// a time by all SPREAD lanes: then what a row does not see is left out. What is finite does not pay for that.
#define LARGEST(x) top = max(top, floatBitsToUint(x) & 0x7FFFFFFFu);
// Every block touches the cache lines of the block after the next, a lane a line. 0 TOUCHES: hardware hides the wait.
#define LINE 16
#define LINES ((HEAD_DIM + LINE - 1) / LINE)
#define AHEAD (2 * BLOCK)
#define TOUCHES (TOUCH * (BLOCK * LINES + SPREAD - 1) / SPREAD)
// Register tiles need unrolled loops. SwiftShader takes minutes and gigabytes to unroll them; where its text is not written
// out, it gets loops as they are.
#if ROLLED
#define UNROLL
#else
#define UNROLL [[unroll]]
#endif
#define MANY_HEADS (args.heads & 0xFFFFu)
#define FEW_HEADS (args.heads >> 16)
#define GROUP (MANY_HEADS / FEW_HEADS)
#define HELD_ROW(r) (tile * tile_rows + (r) * gl_SubgroupSize + lane)
#define TILE_ROW(r, i) (HELD_ROW(r) ^ (i)) // the row of register i, in the lanes that share it
#define HELD_OFFSET (int(args.num_streamed) - int(args.num_held)) // of the held rows, where both sides end together

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the work of a mask.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }
