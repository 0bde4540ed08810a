// What each query row adds to the gradient of its head's sink: -exp(sink - lse) * rowsum(dO * O), one subgroup a row of
// head_dim. A sink has the weight exp(sink - lse) and no value behind it.
void main() {
    const uint row = group_index() * gl_NumSubgroups + gl_SubgroupID;
    if (row >= args.rows) return;
    const uint head = row % args.num_heads, query = row / args.num_heads % args.num_queries;
    const uint batch = row / args.num_heads / args.num_queries;
    float sum = 0.0;
    for (uint d = gl_SubgroupInvocationID; d < args.head_dim; d += gl_SubgroupSize)
        sum = fma(args.d_o.v[row * args.head_dim + d], args.o.v[row * args.head_dim + d], sum);
    const float delta = subgroupAdd(sum);
    const float lse = args.lse.v[(batch * args.num_heads + head) * args.num_queries + query];
    const float weight = lse == NEGATIVE_INFINITY ? 0.0 : exp_or_zero(args.sinks.v[head] - lse);
    if (subgroupElect()) args.terms.v[row] = -(weight * delta);
}
