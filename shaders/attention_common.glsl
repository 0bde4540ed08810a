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
#define FLAG_DOCUMENTS 4u
#define FLAG_SINKS 8u
#define NUM_HEADS (args.heads & 0xFFFFu)
#define NUM_KV_HEADS (args.heads >> 16)
#define HAS(flag) ((args.window_flags >> 24 & (flag)) != 0u)
// The score of a query and a key from x = scale * q.k, and its derivative by x. With MODIFIED they come from an
// expression (engine/attention_scores.py) of the score, both positions, and a number of the head.
#if MODIFIED
#define HEAD_VALUE args.per_head.v[head]
#define SCORE(x, query, key) modified_score(x, float(query), float(key), head_value)
#define TIMES_SLOPE(x, query, key) * score_slope(x, float(query), float(key), head_value)
#else
#define HEAD_VALUE 0.0
#define SCORE(x, query, key) (x)
#define TIMES_SLOPE(x, query, key)
#endif

// Costly and cheap tiles alternate, so that any contiguous half of the workgroups holds half of the causal work.
uint balanced_tile(uint turn, uint tiles) { return (turn & 1u) == 0u ? tiles - 1u - turn / 2u : turn / 2u; }

// Keys a batch item has at all.
int key_limit(uint batch) {
    int limit = int(args.num_keys);
    if (HAS(FLAG_LENGTHS)) limit = clamp(args.key_lengths.v[batch], 0, limit);
    return limit;
}

// First position of the document that holds this one, and one past the last; nothing where there is no such position.
ivec2 document_of(int position, uint batch) {
    if (!HAS(FLAG_DOCUMENTS)) return ivec2(-0x40000000, 0x40000000);
    if (position < 0 || position >= int(args.num_keys)) return ivec2(0, 0);
    const uint at = 2u * (batch * args.num_keys + uint(position));
    return ivec2(args.documents.v[at], args.documents.v[at + 1u]);
}

// First key the query at this position sees, and one past the last.
ivec2 keys_of_query(int position, int limit, uint batch) {
    const int window = int(args.window_flags & 0xFFFFFFu);
    const ivec2 document = document_of(position, batch);
    int low = max(window > 0 ? max(position - window + 1, 0) : 0, document.x);
    int high = min(window > 0 ? min(position + window, limit) : limit, document.y);
    if (HAS(FLAG_CAUSAL)) high = min(high, position + 1);
    return ivec2(low, high);
}

// First query position that sees this key, and one past the last; `last` is one past the last position there is.
ivec2 positions_of_key(int key, int limit, int first, int last, uint batch) {
    const int window = int(args.window_flags & 0xFFFFFFu);
    const ivec2 document = document_of(key, batch);
    int low = max(window > 0 ? max(key - window + 1, first) : first, document.x);
    int high = min(window > 0 ? min(key + window, last) : last, document.y);
    if (HAS(FLAG_CAUSAL)) low = max(low, key);
    return key < limit ? ivec2(low, high) : ivec2(first, first);
}
