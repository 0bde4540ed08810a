// How a block fold (engine/block_fold.py) goes about its tiles; the kernel's main is printed by engine/block_fold_glsl.py.
//
// SPREAD lanes hold SPREAD * ROWS held rows together and walk over the streamed rows in blocks of BLOCK. Of each row, held
// or streamed, a lane has VECS elements: WIDTH neighbours of every WIDTH * SPREAD dimensions. In a product each lane sums
// up its own dimensions for SPREAD held rows, then ADD_LANES adds the lanes up so that lane i has the product of row i.
// What belongs to a row (states, weights) lies in that lane, and comes to all by FROM_LANE where streamed rows are added:
// one shuffle serves VECS multiplications. WIDTH is a function of head_dim, so that bits do not depend on how it is loaded.
#define WIDTH (HEAD_DIM % (2 * SPREAD) == 0 ? 2 : 1)
#define VECS ((HEAD_DIM + WIDTH * SPREAD - 1) / (WIDTH * SPREAD) * WIDTH)
// Where vector c begins, counted from this lane's first dimension; whether this lane's part of it is there at all.
#define DIM(c) ((c) / WIDTH * (WIDTH * SPREAD) + (c) % WIDTH)
#define HAS_DIM(c) (((c) < HEAD_DIM / (WIDTH * SPREAD) * WIDTH ? 0u : my_dim) + DIM(c) < HEAD_DIM)
// Vector c of the row that begins at p.v[at - my_dim], to to[k]; 0 past the last dimension. PAIRS: c and c + 1 as one 64-bit
// word (shaders/words.glsl says why); strides and addresses are then even.
#if PAIRS
layout(buffer_reference, std430, buffer_reference_align = 8) buffer U64 { uint64_t v[]; };
vec2 load_pair(F32 p, uint i) { return uintBitsToFloat(unpackUint2x32(U64(uvec2(p)).v[i >> 1])); }
#define LOAD(to, k, p, at, c) if ((c) % 2 == 0) { \
        const vec2 pair = load_pair(p, (at) + DIM(c)); to[k] = pair.x; to[(k) + 1] = pair.y; }
#else
#define LOAD(to, k, p, at, c) { \
        const float element = p.v[HAS_DIM(c) ? (at) + DIM(c) : (at) - my_dim]; to[k] = HAS_DIM(c) ? element : 0.0; }
#endif
// A step of adding the lanes up: lanes of the lower half go on with a[i], the others with a[i + half].
#define ADD_HALVES(a, i, half) { const bool low_half = (lane & half) == 0u; const float one = a[i], other = a[i + half]; \
        a[i] = (low_half ? one : other) + subgroupShuffleXor(low_half ? other : one, half); }
// SwiftShader broadcasts faster than it shuffles, which takes a constant lane; lavapipe does not.
#define SHUFFLED(x, i) subgroupShuffle(x, gl_SubgroupSize == SPREAD ? (i) : lane - my_lane + (i))
#if WRITTEN
#define FROM_LANE(x, i) subgroupBroadcast(x, i)
#else
#define FROM_LANE(x, i) SHUFFLED(x, i)
#endif
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
#define TILE_ROW(r, i) (HELD_ROW(r) - my_lane + (i))
#define HELD_OFFSET (int(args.num_streamed) - int(args.num_held)) // of the held rows, where both sides end together

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the work of a mask.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }
