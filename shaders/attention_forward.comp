// Attention forward, one fold over key blocks (Dao 2023, FlashAttention-2; online softmax of Milakov & Gimelshein 2018).
// A lane holds ROWS query rows: q, the unnormalised output and the running maximum and sum stay in registers.
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
    const int offset = int(args.num_keys) - int(args.num_queries);  // position of query 0
    const int limit = key_limit(batch);

    const float head_value = HEAD_VALUE;
    // A sink is a score with no value behind it: it starts the sum.
    float sink = NEGATIVE_INFINITY;
    if (HAS(FLAG_SINKS)) sink = args.sinks.v[head];

    float q[ROWS * HEAD_DIM], acc[ROWS * HEAD_DIM], top[ROWS], total[ROWS];
    int low[ROWS], count[ROWS];
    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        const ivec2 seen = keys_of_query(offset + int(row), limit, batch);
        low[r] = seen.x;
        count[r] = max(seen.y - seen.x, 0);
        top[r] = sink;
        total[r] = sink == NEGATIVE_INFINITY ? 0.0 : 1.0;
        const uint at = (batch * args.num_queries + min(row, args.num_queries - 1u)) * args.q_row + head * HEAD_DIM;
        UNROLL for (uint d = 0; d < HEAD_DIM; d++) {
            q[r * HEAD_DIM + d] = args.q.v[at + d];
            acc[r * HEAD_DIM + d] = 0.0;
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
        // Rows past the end are read from the last valid key and masked: they may never have been written.
        const uint at = base + uint(min(key + my_key, end - 1)) * args.kv_row + my_dim;
        float s[ROWS * KEYS];
        UNROLL for (uint i = 0; i < ROWS * KEYS; i++) s[i] = 0.0;
        UNROLL for (uint c = 0; c < CHUNKS; c++) {
            const float loaded = args.k.v[CHUNK_INDEX(c)];
            UNROLL for (uint u = 0; u < DIMS; u++) {
                if (c * DIMS + u < HEAD_DIM) {
                    UNROLL for (uint j = 0; j < KEYS; j++) {
                        const float k = subgroupShuffle(loaded, u * KEYS + j);
                        UNROLL for (uint r = 0; r < ROWS; r++)
                            s[r * KEYS + j] = fma(q[r * HEAD_DIM + c * DIMS + u], k, s[r * KEYS + j]);
                    }
                }
            }
        }
        float decay[ROWS];
        UNROLL for (uint r = 0; r < ROWS; r++) {
            float highest = top[r];
            UNROLL for (uint j = 0; j < KEYS; j++) {
                const bool seen = uint(key + int(j) - low[r]) < uint(count[r]);
                const float x = s[r * KEYS + j] * args.scale;
                s[r * KEYS + j] = seen ? SCORE(x, POSITION(r), key + int(j)) : NEGATIVE_INFINITY;
                highest = max(highest, s[r * KEYS + j]);
            }
            decay[r] = softmax_decay(top[r], highest);
            top[r] = highest;
            float sum = 0.0;
            UNROLL for (uint j = 0; j < KEYS; j++) {
                s[r * KEYS + j] = softmax_weight(s[r * KEYS + j], highest);
                sum += s[r * KEYS + j];
            }
            total[r] = fma(total[r], decay[r], sum);
        }
        UNROLL for (uint c = 0; c < CHUNKS; c++) {
            const float loaded = args.v.v[CHUNK_INDEX(c)];
            UNROLL for (uint u = 0; u < DIMS; u++) {
                if (c * DIMS + u < HEAD_DIM) {
                    UNROLL for (uint r = 0; r < ROWS; r++) acc[r * HEAD_DIM + c * DIMS + u] *= decay[r];
                    UNROLL for (uint j = 0; j < KEYS; j++) {
                        const float v = subgroupShuffle(loaded, u * KEYS + j);
                        UNROLL for (uint r = 0; r < ROWS; r++)
                            acc[r * HEAD_DIM + c * DIMS + u] = fma(s[r * KEYS + j], v, acc[r * HEAD_DIM + c * DIMS + u]);
                    }
                }
            }
        }
    }

    UNROLL for (uint r = 0; r < ROWS; r++) {
        const uint row = tile * tile_rows + r * gl_SubgroupSize + lane;
        if (row < args.num_queries) {
            const uint at = (batch * args.num_queries + row) * args.o_row + head * HEAD_DIM;
            const bool empty = total[r] == 0.0;
            UNROLL for (uint d = 0; d < HEAD_DIM; d++)
                args.o.v[at + d] = empty ? 0.0 : acc[r * HEAD_DIM + d] / total[r];
            args.lse.v[(batch * NUM_HEADS + head) * args.num_queries + row] =
                empty ? NEGATIVE_INFINITY : top[r] + log_or_nan(total[r]);
        }
    }
}
