// Attention backward for queries: dQ, and delta = rowsum(dO * O), which attention_d_kv reads (Dao 2023, section 3.2).
// Scores are computed again from q, k and the log-sum-exp; a lane holds q, dO and dQ of ROWS query rows in registers.
#include "attention_common.glsl"
#define POSITION(r) (offset + int(tile * tile_rows + (r) * gl_SubgroupSize + lane))

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint tile_rows = gl_SubgroupSize * ROWS;
    const uint tiles = (args.num_queries + tile_rows - 1u) / tile_rows;
    const uint tile = balanced_tile(group_index() % tiles, tiles);
    const uint batch = group_index() / tiles / NUM_HEADS;
    const uint head = group_index() / tiles % NUM_HEADS;
    const uint kv_head = head / (NUM_HEADS / NUM_KV_HEADS);
    const int offset = int(args.num_keys) - int(args.num_queries);
    const int limit = key_limit(batch);

    const float head_value = HEAD_VALUE;

    float q[ROWS * HEAD_DIM], d_o[ROWS * HEAD_DIM], d_q[ROWS * HEAD_DIM], lse[ROWS], delta[ROWS];
    int low[ROWS], count[ROWS];
    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        const uint real = min(row, args.num_queries - 1u);
        const ivec2 seen = keys_of_query(offset + int(row), limit, batch);
        low[r] = seen.x;
        lse[r] = args.lse.v[(batch * NUM_HEADS + head) * args.num_queries + real];
        count[r] = lse[r] == NEGATIVE_INFINITY ? 0 : max(seen.y - seen.x, 0);  // a row without weights has no gradient
        delta[r] = 0.0;
        const uint at = (batch * args.num_queries + real) * args.q_row + head * HEAD_DIM;
        const uint at_o = (batch * args.num_queries + real) * args.o_row + head * HEAD_DIM;
        UNROLL for (uint d = 0; d < HEAD_DIM; d++) {
            q[r * HEAD_DIM + d] = args.q.v[at + d];
            d_o[r * HEAD_DIM + d] = args.d_o.v[at_o + d];
            d_q[r * HEAD_DIM + d] = 0.0;
            delta[r] = fma(d_o[r * HEAD_DIM + d], args.o.v[at_o + d], delta[r]);
        }
    }

    const int first = int(tile * tile_rows);
    const int last = min(first + int(tile_rows), int(args.num_queries)) - 1;
    const int begin = keys_of_query(offset + first, limit, batch).x / KEYS * KEYS;
    const int end = keys_of_query(offset + last, limit, batch).y;
    const uint base = batch * args.num_keys * args.kv_row + kv_head * HEAD_DIM;
    const int my_key = int(lane % KEYS);
    const uint my_dim = lane / KEYS % DIMS;
    for (int key = begin; key < end; key += KEYS) {
        const uint at = base + uint(min(key + my_key, end - 1)) * args.kv_row + my_dim;
        float s[ROWS * KEYS], d_p[ROWS * KEYS], keys[CHUNKS];
        UNROLL for (uint i = 0; i < ROWS * KEYS; i++) s[i] = d_p[i] = 0.0;
        UNROLL for (uint c = 0; c < CHUNKS; c++) {
            keys[c] = args.k.v[CHUNK_INDEX(c)];
            const float values = args.v.v[CHUNK_INDEX(c)];
            UNROLL for (uint u = 0; u < DIMS; u++) {
                if (c * DIMS + u < HEAD_DIM) {
                    UNROLL for (uint j = 0; j < KEYS; j++) {
                        const float k = subgroupShuffle(keys[c], u * KEYS + j);
                        const float v = subgroupShuffle(values, u * KEYS + j);
                        UNROLL for (uint r = 0; r < ROWS; r++) {
                            const uint at_d = r * HEAD_DIM + c * DIMS + u;
                            s[r * KEYS + j] = fma(q[at_d], k, s[r * KEYS + j]);
                            d_p[r * KEYS + j] = fma(d_o[at_d], v, d_p[r * KEYS + j]);
                        }
                    }
                }
            }
        }
        UNROLL for (uint r = 0; r < ROWS; r++) {
            UNROLL for (uint j = 0; j < KEYS; j++) {
                const uint i = r * KEYS + j;
                const bool seen = uint(key + int(j) - low[r]) < uint(count[r]);
                const float x = s[i] * args.scale;
                const float p = exp_or_zero(SCORE(x, POSITION(r), key + int(j)) - lse[r]);
                s[i] = seen ? p * (d_p[i] - delta[r]) TIMES_SLOPE(x, POSITION(r), key + int(j)) * args.scale : 0.0;
            }
        }
        UNROLL for (uint c = 0; c < CHUNKS; c++) {
            UNROLL for (uint u = 0; u < DIMS; u++) {
                if (c * DIMS + u < HEAD_DIM) {
                    UNROLL for (uint j = 0; j < KEYS; j++) {
                        const float k = subgroupShuffle(keys[c], u * KEYS + j);
                        UNROLL for (uint r = 0; r < ROWS; r++) {
                            const uint at_d = r * HEAD_DIM + c * DIMS + u;
                            d_q[at_d] = fma(s[r * KEYS + j], k, d_q[at_d]);
                        }
                    }
                }
            }
        }
    }

    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        if (row < args.num_queries) {
            const uint at = (batch * args.num_queries + row) * args.q_row + head * HEAD_DIM;
            UNROLL for (uint d = 0; d < HEAD_DIM; d++) args.d_q.v[at + d] = d_q[r * HEAD_DIM + d];
            args.delta.v[(batch * NUM_HEADS + head) * args.num_queries + row] = delta[r];
        }
    }
}
