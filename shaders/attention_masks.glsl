// Which keys a query sees, and which queries see a key: the mask rule of engine/attention_masks.py. Query i of s stands at
// position t - s + i among t keys. KEYS_HELD: keys are the held rows of the block fold, queries the streamed ones.
#define FLAG_CAUSAL 1u
#define FLAG_LENGTHS 2u
#define FLAG_DOCUMENTS 4u
#define HAS(flag) ((args.flags >> 24 & (flag)) != 0u)
#define WINDOW int(args.flags & 0xFFFFFFu)
#if KEYS_HELD
#define NUM_KEYS int(args.num_held)
#define NUM_QUERIES int(args.num_streamed)
#else
#define NUM_KEYS int(args.num_streamed)
#define NUM_QUERIES int(args.num_held)
#endif
#define OFFSET (NUM_KEYS - NUM_QUERIES) // position of query 0

// Keys a batch item has at all.
int seen_limit(uint batch) {
    int limit = NUM_KEYS;
    if (HAS(FLAG_LENGTHS)) limit = clamp(args.p_key_lengths.v[batch], 0, limit);
    return limit;
}

// First position of the document that holds this one, and one past the last; nothing where there is no such position.
ivec2 document_of(int position, uint batch) {
    if (!HAS(FLAG_DOCUMENTS)) return ivec2(-0x40000000, 0x40000000);
    if (position < 0 || position >= NUM_KEYS) return ivec2(0, 0);
    const uint at = 2u * (batch * uint(NUM_KEYS) + uint(position));
    return ivec2(args.p_documents.v[at], args.p_documents.v[at + 1u]);
}

#if KEYS_HELD
// First query that sees this key, and one past the last.
ivec2 seen_of_row(int key, int limit, uint batch) {
    const ivec2 document = document_of(key, batch);
    int low = max(WINDOW > 0 ? max(key - WINDOW + 1, OFFSET) : OFFSET, document.x);
    int high = min(WINDOW > 0 ? min(key + WINDOW, NUM_KEYS) : NUM_KEYS, document.y);
    if (HAS(FLAG_CAUSAL)) low = max(low, key);
    return key < limit ? ivec2(low, high) - OFFSET : ivec2(0);
}

// The same for all keys from first to before past together; keys past the limit are seen by none.
ivec2 seen_of_rows(int first, int past, int limit, uint batch) {
    const int last = min(past, limit) - 1;
    if (last < first) return ivec2(0);
    return ivec2(seen_of_row(first, NUM_KEYS, batch).x, seen_of_row(last, NUM_KEYS, batch).y);
}
#else
// First key this query sees, and one past the last.
ivec2 seen_of_row(int query, int limit, uint batch) {
    const int position = OFFSET + query;
    const ivec2 document = document_of(position, batch);
    int low = max(WINDOW > 0 ? max(position - WINDOW + 1, 0) : 0, document.x);
    int high = min(WINDOW > 0 ? min(position + WINDOW, limit) : limit, document.y);
    if (HAS(FLAG_CAUSAL)) high = min(high, position + 1);
    return ivec2(low, high);
}

// The same for all queries from first to before past together.
ivec2 seen_of_rows(int first, int past, int limit, uint batch) {
    return ivec2(seen_of_row(first, limit, batch).x, seen_of_row(past - 1, limit, batch).y);
}
#endif
