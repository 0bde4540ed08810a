// How a block fold (engine/block_fold.py) goes about its tiles; the kernel's main is printed by engine/block_fold_glsl.py.
//
// A subgroup owns ROWS held rows a lane and walks over the streamed rows in blocks of BLOCK. Of such a block each lane of
// the first SPREAD loads one element: row lane % BLOCK, dimension chunk * DIMS + lane / BLOCK. subgroupShuffle with a
// constant lane then spreads it to all rows of the tile, so one load serves SPREAD * ROWS multiplications a lane.
#define DIMS (SPREAD / BLOCK)
#define CHUNKS ((HEAD_DIM + DIMS - 1) / DIMS)
// Where this lane's element of chunk c lies; at: row start + my_dim. Lanes past the last dimension repeat it, unused.
#define IN_CHUNK(at, c) \
    ((c) * DIMS + DIMS <= HEAD_DIM ? (at) + (c) * DIMS : (at) - my_dim + min((c) * DIMS + my_dim, HEAD_DIM - 1u))
// Register tiles need unrolled loops. Only SwiftShader takes minutes and gigabytes for them; it gets loops as they are.
#if ROLLED
#define UNROLL
#else
#define UNROLL [[unroll]]
#endif
#define MANY_HEADS (args.heads & 0xFFFFu)
#define FEW_HEADS (args.heads >> 16)
#define GROUP (MANY_HEADS / FEW_HEADS)
#define HELD_ROW(r) (tile * tile_rows + (r) * gl_SubgroupSize + lane)
#define HELD_OFFSET (int(args.num_streamed) - int(args.num_held)) // of the held rows, where both sides end together

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the work of a mask.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }
