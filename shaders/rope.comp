// One pair of columns an invocation: (a, b) -> (a cos - b sin, a sin + b cos), in place.
// INTERLEAVED: pairs are columns 2i, 2i+1 of a head; else columns i and i + half.
void main() {
    const uint index = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (index >= args.num_pairs) return;
    const uint pair = index % args.half_dim;
    const uint head = (index / args.half_dim) % args.num_heads;
    const uint row = index / (args.half_dim * args.num_heads);
    const uint position = row % args.seq + args.position_offset;
    const uint head_start = row * args.width + head * 2u * args.half_dim;
#if INTERLEAVED
    const uint first = head_start + 2u * pair, second = first + 1u;
#else
    const uint first = head_start + pair, second = first + args.half_dim;
#endif
    const float c = args.cos_table.v[position * args.half_dim + pair];
    const float s = args.sin_table.v[position * args.half_dim + pair] * args.direction;
    const float a = args.x.v[first], b = args.x.v[second];
    args.x.v[first] = fma(a, c, -(b * s));
    args.x.v[second] = fma(a, s, b * c);
}
