// AdamW or SGD on many tensors: a workgroup takes CHUNK elements of the tensor that the table names, in 16-byte steps as
// far as the tensor allows, one by one behind that. Element by element the arithmetic is that of the one-tensor kernels.
#define TABLE_FIRST(i) args.table.v[3 * (i) + 2].y
#include "tensor_table.glsl"
#include "words.glsl"
#if ADAMW
#include "adamw.glsl"
#else
#include "sgd.glsl"
#endif

void main() {
    float clip = 1.0;
    if (args.has_state != 0) {
        if (args.state.v[1] == 0.0) return;
        clip = args.state.v[0];
    }
    const uint group = group_index(), row = table_row(group);
    const uvec4 first_two = args.table.v[3 * row], last_two = args.table.v[3 * row + 1], sizes = args.table.v[3 * row + 2];
    const float weight_decay = uintBitsToFloat(sizes.z);
    const uint begin = (group - sizes.y) * CHUNK, end = min(sizes.x, begin + CHUNK), wide_end = min(end, sizes.w);
    // Eight neighbours walk along a part of their own: a CPU driver does that in one go, through memory as it lies, and
    // their 128 bytes a tensor are a cache line of a GPU.
    const uint part = CHUNK * 8 / gl_WorkGroupSize.x, first = begin + gl_LocalInvocationID.x / 8 * part;
    const uint part_end = min(wide_end, first + part);
    for (uint c = first + 4 * (gl_LocalInvocationID.x % 8); c < part_end; c += 32) {
        const uint i = c >> 2;
        vec4 p = read4(F32x4(first_two.xy), i);
        const vec4 g = read4(F32x4(first_two.zw), i) * clip;
#if ADAMW
        vec4 m = read4(F32x4(last_two.xy), i), v = read4(F32x4(last_two.zw), i);
        adamw(g, m, v, p, weight_decay);
        write4(F32x4(last_two.xy), i, m);
        write4(F32x4(last_two.zw), i, v);
#else
        vec4 b = vec4(0.0);
#if MOMENTUM
        b = read4(F32x4(last_two.xy), i);
#endif
        sgd(g, b, p, weight_decay);
#if MOMENTUM
        write4(F32x4(last_two.xy), i, b);
#endif
#endif
        write4(F32x4(first_two.xy), i, p);
    }
    for (uint i = max(begin, wide_end) + gl_LocalInvocationID.x; i < end; i += gl_WorkGroupSize.x) {
        vec4 p = vec4(F32(first_two.xy).v[i]);
        const vec4 g = vec4(F32(first_two.zw).v[i]) * clip;
#if ADAMW
        vec4 m = vec4(F32(last_two.xy).v[i]), v = vec4(F32(last_two.zw).v[i]);
        adamw(g, m, v, p, weight_decay);
        F32(last_two.xy).v[i] = m.x;
        F32(last_two.zw).v[i] = v.x;
#else
        vec4 b = vec4(0.0);
#if MOMENTUM
        b = vec4(F32(last_two.xy).v[i]);
#endif
        sgd(g, b, p, weight_decay);
#if MOMENTUM
        F32(last_two.xy).v[i] = b.x;
#endif
#endif
        F32(first_two.xy).v[i] = p.x;
    }
}
