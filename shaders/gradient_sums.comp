// Each subgroup adds the partial sums of one tensor. TABLE: of many tensors, whose parts the table names; else of one.
#include "squares.glsl"

void main() {
#if TABLE
    const uint tensor = group_index() * gl_NumSubgroups + gl_SubgroupID;
    if (tensor >= args.num_tensors) return;
    const uvec4 row = args.table.v[2 * tensor + 1];
    const uint first = row.x, parts = row.y;
#else
    if (gl_SubgroupID > 0) return;
    const uint tensor = 0, first = 0, parts = args.parts;
#endif
    float sum = 0.0;
    bool small = false;
    for (uint part = gl_SubgroupInvocationID; part < parts; part += gl_SubgroupSize) {
        const float square = args.partials.v[first + part];
        sum += square;
        small = small || square < 0.0;
    }
    sum = subgroupAdd(sum);
    if (subgroupAny(small) || isinf(sum)) {
        sum = 0.0;
        for (uint part = gl_SubgroupInvocationID; part < parts; part += gl_SubgroupSize)
            sum += small_of(args.partials.v[first + part]);
        sum = as_small(subgroupAdd(sum));
    }
    if (subgroupElect()) args.sums.v[tensor] = sum;
}
