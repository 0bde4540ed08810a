// Goes through an invocation's pieces: STEPS of them, a workgroup apart. `piece`, which does one, stands before this.
void main() {
    const uint start = group_index() * gl_WorkGroupSize.x * STEPS + gl_LocalInvocationID.x;
    [[unroll]] for (uint turn = 0; turn < STEPS; ++turn) piece(start + turn * gl_WorkGroupSize.x);
}
