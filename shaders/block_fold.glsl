// How a block fold (engine/block_fold.py) goes about its tiles; the kernel's main is printed by engine/block_fold_glsl.py.
//
// A subgroup owns ROWS held rows a lane and walks over the streamed rows in blocks of BLOCK. Of such a block each lane of
// the first SPREAD loads WIDTH elements: of row lane % BLOCK, from dimension chunk * CHUNK + lane / BLOCK * WIDTH on.
// subgroupShuffle with a constant lane then spreads them to all rows of the tile, so one load serves SPREAD * ROWS
// multiplications a lane. WIDTH 2: two neighbours as one 64-bit word (shaders/words.glsl says why); head_dim, strides and
// addresses are then even.
#define CHUNK (SPREAD / BLOCK * WIDTH)
#define CHUNKS ((HEAD_DIM + CHUNK - 1) / CHUNK)
// Where this lane's elements of chunk c lie; at: row start + my_dim. Lanes past the last dimension repeat it, unused.
#define IN_CHUNK(at, c) \
    ((c) * CHUNK + CHUNK <= HEAD_DIM ? (at) + (c) * CHUNK : (at) - my_dim + min((c) * CHUNK + my_dim, HEAD_DIM - WIDTH))
// WIDTH elements from i on, to to[j], ...
#if WIDTH == 2
layout(buffer_reference, std430, buffer_reference_align = 8) buffer U64 { uint64_t v[]; };
vec2 load_pair(F32 p, uint i) { return uintBitsToFloat(unpackUint2x32(U64(uvec2(p)).v[i >> 1])); }
#define LOAD(p, i, to, j) { const vec2 pair = load_pair(p, i); to[j] = pair.x; to[j + 1] = pair.y; }
#else
#define LOAD(p, i, to, j) to[j] = p.v[i];
#endif
// Register tiles need unrolled loops. SwiftShader takes minutes and gigabytes to unroll them; where its text is not written
// out, it gets loops as they are. It broadcasts faster than it shuffles, which takes a constant lane; lavapipe does not.
#if ROLLED
#define UNROLL
#else
#define UNROLL [[unroll]]
#endif
#if WRITTEN
#define FROM_LANE(x, lane) subgroupBroadcast(x, lane)
#else
#define FROM_LANE(x, lane) subgroupShuffle(x, lane)
#endif
#define MANY_HEADS (args.heads & 0xFFFFu)
#define FEW_HEADS (args.heads >> 16)
#define GROUP (MANY_HEADS / FEW_HEADS)
#define HELD_ROW(r) (tile * tile_rows + (r) * gl_SubgroupSize + lane)
#define HELD_OFFSET (int(args.num_streamed) - int(args.num_held)) // of the held rows, where both sides end together

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the work of a mask.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }
