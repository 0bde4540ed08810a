// Chains equal token ids: one subgroup looks backwards from each position for the nearest earlier one with its id and
// stops there. links[2p] = next position of the same id (0: none), links[2t + 1] = 1 when t is not the first. Position t
// alone writes both of its words, so the result does not depend on timing.

int token_id(uint t) { return clamp(args.tokens.v[t], 0, int(args.vocabulary) - 1); }

void main() {
    const uint t = group_index() * gl_NumSubgroups + gl_SubgroupID;
    if (t >= args.num_tokens) return;
    const int id = token_id(t);
    for (uint end = t; end > 0; end -= min(end, gl_SubgroupSize)) { // positions end-1, end-2, ...: nearest first
        bool found = false;
        if (gl_SubgroupInvocationID < end) found = token_id(end - 1 - gl_SubgroupInvocationID) == id;
        uvec4 votes = subgroupBallot(found);
        if (subgroupBallotBitCount(votes) != 0) {
            uint previous = end - 1 - subgroupBallotFindLSB(votes);
            if (subgroupElect()) {
                args.links.v[2 * previous] = t;
                args.links.v[2 * t + 1] = 1;
            }
            break;
        }
    }
}
