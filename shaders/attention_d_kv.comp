// Attention backward for keys and values: a lane holds k, v, dK and dV of ROWS key rows in registers and walks over the
// queries that see them, of all query heads of the group in order, so nothing is ever added up by two tiles. A dispatch
// takes `members` of each group (first in the low half, number in the high one); with CONTINUES it goes on with the sums
// of the dispatch before.
#include "attention_common.glsl"
#define KEY(r) (tile * tile_rows + (r) * gl_SubgroupSize + lane)

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint tile_rows = gl_SubgroupSize * ROWS;
    const uint tiles = (args.num_keys + tile_rows - 1u) / tile_rows;
    const uint tile = balanced_tile(group_index() % tiles, tiles);
    const uint batch = group_index() / tiles / NUM_KV_HEADS;
    const uint kv_head = group_index() / tiles % NUM_KV_HEADS;
    const uint group = NUM_HEADS / NUM_KV_HEADS;
    const int offset = int(args.num_keys) - int(args.num_queries);  // position of query 0
    const int past = int(args.num_keys);  // one past the position of the last query
    const int limit = key_limit(batch);

    float k[ROWS * HEAD_DIM], v[ROWS * HEAD_DIM], d_k[ROWS * HEAD_DIM], d_v[ROWS * HEAD_DIM];
    int low[ROWS], count[ROWS];
    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        const ivec2 seen = positions_of_key(int(row), limit, offset, past, batch);
        low[r] = seen.x;
        count[r] = max(seen.y - seen.x, 0);
        const uint at = (batch * args.num_keys + min(row, args.num_keys - 1u)) * args.kv_row + kv_head * HEAD_DIM;
        UNROLL for (uint d = 0; d < HEAD_DIM; d++) {
            k[r * HEAD_DIM + d] = args.k.v[at + d];
            v[r * HEAD_DIM + d] = args.v.v[at + d];
#if CONTINUES
            d_k[r * HEAD_DIM + d] = args.d_k.v[at + d];
            d_v[r * HEAD_DIM + d] = args.d_v.v[at + d];
#else
            d_k[r * HEAD_DIM + d] = 0.0;
            d_v[r * HEAD_DIM + d] = 0.0;
#endif
        }
    }

    // Query rows that any key of the tile is seen by; keys past the limit are seen by none.
    const int first = int(tile * tile_rows);
    const int last = min(first + int(tile_rows), limit) - 1;
    const int begin = (positions_of_key(first, past, offset, past, batch).x - offset) / KEYS * KEYS;
    const int end = last < first ? begin : positions_of_key(last, past, offset, past, batch).y - offset;
    const int my_query = int(lane % KEYS);
    const uint my_dim = lane / KEYS % DIMS;
    for (uint member = 0; member < args.members >> 16; member++) {
        const uint head = kv_head * group + (args.members & 0xFFFFu) + member;
        const float head_value = HEAD_VALUE;
        const uint lse_base = (batch * NUM_HEADS + head) * args.num_queries;
        for (int query = begin; query < end; query += KEYS) {
            const uint mine = uint(min(query + my_query, int(args.num_queries) - 1));
            const uint my_row = batch * args.num_queries + mine;
            const float my_lse = args.lse.v[lse_base + mine], my_delta = args.delta.v[lse_base + mine];
            float s[ROWS * KEYS], d_p[ROWS * KEYS], queries[CHUNKS], d_outputs[CHUNKS];
            UNROLL for (uint i = 0; i < ROWS * KEYS; i++) s[i] = d_p[i] = 0.0;
            UNROLL for (uint c = 0; c < CHUNKS; c++) {
                uint at = my_row * args.q_row + head * HEAD_DIM + my_dim;
                queries[c] = args.q.v[CHUNK_INDEX(c)];
                at = my_row * args.o_row + head * HEAD_DIM + my_dim;
                d_outputs[c] = args.d_o.v[CHUNK_INDEX(c)];
                UNROLL for (uint u = 0; u < DIMS; u++) {
                    if (c * DIMS + u < HEAD_DIM) {
                        UNROLL for (uint j = 0; j < KEYS; j++) {
                            const float q = subgroupShuffle(queries[c], u * KEYS + j);
                            const float d_o = subgroupShuffle(d_outputs[c], u * KEYS + j);
                            UNROLL for (uint r = 0; r < ROWS; r++) {
                                const uint at_d = r * HEAD_DIM + c * DIMS + u;
                                s[r * KEYS + j] = fma(k[at_d], q, s[r * KEYS + j]);
                                d_p[r * KEYS + j] = fma(v[at_d], d_o, d_p[r * KEYS + j]);
                            }
                        }
                    }
                }
            }
            UNROLL for (uint j = 0; j < KEYS; j++) {
                const float lse = subgroupShuffle(my_lse, j);
                const float delta = subgroupShuffle(my_delta, j);
                UNROLL for (uint r = 0; r < ROWS; r++) {
                    const uint i = r * KEYS + j;
                    const bool seen = uint(offset + query + int(j) - low[r]) < uint(count[r]) && lse != NEGATIVE_INFINITY;
                    const float x = s[i] * args.scale;
                    const int position = offset + query + int(j);
                    const float p = seen ? exp_or_zero(SCORE(x, position, KEY(r)) - lse) : 0.0;
                    s[i] = p;
                    d_p[i] = seen ? p * (d_p[i] - delta) TIMES_SLOPE(x, position, KEY(r)) * args.scale : 0.0;
                }
            }
            UNROLL for (uint c = 0; c < CHUNKS; c++) {
                UNROLL for (uint u = 0; u < DIMS; u++) {
                    if (c * DIMS + u < HEAD_DIM) {
                        UNROLL for (uint j = 0; j < KEYS; j++) {
                            const float q = subgroupShuffle(queries[c], u * KEYS + j);
                            const float d_o = subgroupShuffle(d_outputs[c], u * KEYS + j);
                            UNROLL for (uint r = 0; r < ROWS; r++) {
                                const uint at_d = r * HEAD_DIM + c * DIMS + u;
                                d_k[at_d] = fma(d_p[r * KEYS + j], q, d_k[at_d]);
                                d_v[at_d] = fma(s[r * KEYS + j], d_o, d_v[at_d]);
                            }
                        }
                    }
                }
            }
        }
    }

    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        if (row < args.num_keys) {
            const uint at = (batch * args.num_keys + row) * args.kv_row + kv_head * HEAD_DIM;
            UNROLL for (uint d = 0; d < HEAD_DIM; d++) {
                args.d_k.v[at + d] = d_k[r * HEAD_DIM + d];
                args.d_v.v[at + d] = d_v[r * HEAD_DIM + d];
            }
        }
    }
}
