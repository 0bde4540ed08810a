// Each subgroup adds the partial sums of one tensor; parts that the tensor does not have hold 0.
#include "rows.glsl"

void main() {
    const uint tensor = subgroup_row();
    if (tensor >= args.num_tensors) return;
    float sum = 0.0;
    for (uint part = gl_SubgroupInvocationID; part < args.parts; part += gl_SubgroupSize)
        sum += args.partials.v[tensor * args.parts + part];
    sum = subgroupAdd(sum);
    if (subgroupElect()) args.sums.v[tensor] = sum;
}
