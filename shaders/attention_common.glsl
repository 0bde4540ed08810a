// What the attention kernels share: which keys a query sees, and how one tile is found.
//
// A subgroup owns ROWS rows a lane (queries, or keys in attention_d_kv) and walks over the other side in blocks of KEYS
// rows. Of such a block each lane of the first SPREAD loads one element: row lane % KEYS, dimension
// chunk * DIMS + lane / KEYS. subgroupShuffle with a constant lane then spreads it to all rows of the tile, so one load
// serves SPREAD * ROWS multiplications a lane.
#define DIMS (SPREAD / KEYS)
#define CHUNKS ((HEAD_DIM + DIMS - 1) / DIMS)
// The element this lane loads of chunk c; at: row start + my_dim. Lanes past the last dimension repeat it, unused.
#define CHUNK_INDEX(c) ((c) * DIMS + DIMS <= HEAD_DIM ? at + (c) * DIMS : at - my_dim + min((c) * DIMS + my_dim, HEAD_DIM - 1u))
// Register tiles need unrolled loops. Only SwiftShader takes minutes and gigabytes for them; it gets loops as they are.
#if ROLLED
#define UNROLL
#else
#define UNROLL [[unroll]]
#endif
#define FLAG_CAUSAL 1u
#define FLAG_LENGTHS 2u

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the causal work.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }

// Keys a batch item has at all.
int key_limit(uint batch) {
    int limit = int(args.num_keys);
    if ((args.flags & FLAG_LENGTHS) != 0u) limit = clamp(args.key_lengths.v[batch], 0, limit);
    return limit;
}

// First key the query at this position sees, and one past the last.
ivec2 keys_of_query(int position, int limit) {
    int window = int(args.window);
    int low = window > 0 ? max(position - window + 1, 0) : 0;
    int high = window > 0 ? min(position + window, limit) : limit;
    if ((args.flags & FLAG_CAUSAL) != 0u) high = min(high, position + 1);
    return ivec2(low, high);
}

// First query position that sees this key, and one past the last; `last` is one past the last position there is.
ivec2 positions_of_key(int key, int limit, int first, int last) {
    int window = int(args.window);
    int low = window > 0 ? max(key - window + 1, first) : first;
    int high = window > 0 ? min(key + window, last) : last;
    if ((args.flags & FLAG_CAUSAL) != 0u) low = max(low, key);
    return key < limit ? ivec2(low, high) : ivec2(first, first);
}
