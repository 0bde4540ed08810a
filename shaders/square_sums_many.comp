// square_sums.comp over many tensors: each subgroup sums the squares of one part of the tensor that the table names.
#define TABLE_FIRST(i) args.table.v[2 * (i) + 1].x
#include "tensor_table.glsl"
#include "words.glsl"
#include "squares.glsl"
#include "turns.glsl"

float at(F32 x, uint i, uint end) { return i < end ? x.v[i] : 0.0; }

void main() {
    const uint part = group_index() * gl_NumSubgroups + gl_SubgroupID;
    if (part >= args.num_parts) return;
    const uint row = table_row(part);
    const uvec4 tensor = args.table.v[2 * row], parts = args.table.v[2 * row + 1];
    const uint begin = (part - parts.x) * parts.z, end = min(tensor.z, begin + parts.z);
    const uint stride = 4 * gl_SubgroupSize, wide_end = max(begin, min(end, tensor.w));
    uint base = begin;
    vec4 sums = vec4(0.0);
#define ADD(u)                                                                                         \
    {                                                                                                  \
        const vec4 x = read4(F32x4(tensor.xy), ((base + u * stride) >> 2) + gl_SubgroupInvocationID);  \
        sums = fma(x, x, sums);                                                                        \
    }
#if TURNS > 1
    for (; wide_end - base >= TURNS * stride; base += TURNS * stride) IN_TURNS(ADD)
#endif
    for (; wide_end - base >= stride; base += stride) ADD(0)
    F32 source = F32(tensor.xy);
    for (; base < end; base += stride) {
        const uint i = base + 4 * gl_SubgroupInvocationID;
        const vec4 x = vec4(at(source, i, end), at(source, i + 1, end), at(source, i + 2, end), at(source, i + 3, end));
        sums = fma(x, x, sums);
    }
    float total = subgroupAdd((sums.x + sums.y) + (sums.z + sums.w));
    if (isinf(total)) {
        sums = vec4(0.0);
        for (uint i = begin + 4 * gl_SubgroupInvocationID; i < end; i += stride) {
            const vec4 x =
                vec4(at(source, i, end), at(source, i + 1, end), at(source, i + 2, end), at(source, i + 3, end)) * SMALL;
            sums = fma(x, x, sums);
        }
        total = as_small(subgroupAdd((sums.x + sums.y) + (sums.z + sums.w)));
    }
    if (subgroupElect()) args.y.v[part] = total;
}
