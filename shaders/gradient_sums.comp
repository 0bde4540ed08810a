// Each subgroup adds the partial sums of one tensor. TABLE: of many tensors, whose parts the table names; else of one.

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
    for (uint part = gl_SubgroupInvocationID; part < parts; part += gl_SubgroupSize)
        sum += args.partials.v[first + part];
    sum = subgroupAdd(sum);
    if (isinf(sum)) {  // -inf, as of a part, where no element is infinite
        bool infinite = false;
        for (uint part = gl_SubgroupInvocationID; part < parts; part += gl_SubgroupSize)
            infinite = (isinf(args.partials.v[first + part]) && args.partials.v[first + part] > 0.0) || infinite;
        sum = subgroupAny(infinite) ? abs(sum) : -abs(sum);
    }
    if (subgroupElect()) args.sums.v[tensor] = sum;
}
