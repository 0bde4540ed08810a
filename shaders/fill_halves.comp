// Fills a 16-bit array that begins or ends in the middle of a word; the other half keeps its value.

void main() {
    const uint word = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    const uint begin = args.start, end = begin + args.n;
    if (word > (end - 1) >> 1) return;
    const uint mask = (2 * word >= begin ? 0xFFFFu : 0u) | (2 * word + 1 < end ? 0xFFFF0000u : 0u);
    args.y.v[word] = (args.y.v[word] & ~mask) | (args.pattern & mask);
}
