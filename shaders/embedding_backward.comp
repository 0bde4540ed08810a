// The first position of each id adds the gradient rows of all positions with that id, in order, and writes the table row.
#include "rows.glsl"

// Adds the row of position t and moves on to the next position of the same id; does nothing at the end of the chain.
void add_row(inout uint t, uint c, inout vec4 sum) {
    if (t == 0) return;
    sum += load4(args.dy, t * args.cols, c, args.cols);
    t = args.links.v[2 * t];
}

void main() {
    const uint cols = args.cols, col_groups = (cols + 3) / 4;
    const uint i = linear_index();
    const uint first = i / col_groups;
    if (first >= args.num_tokens || args.links.v[2 * first + 1] != 0) return;
    const uint c = 4 * (i - first * col_groups);
    vec4 sum = load4(args.dy, first * cols, c, cols);
    // Four links a round: some drivers end an invocation's loops after 65,535 rounds.
    uint t = args.links.v[2 * first];
    while (t != 0) {
        add_row(t, c, sum);
        add_row(t, c, sum);
        add_row(t, c, sum);
        add_row(t, c, sum);
    }
    const uint id = uint(clamp(args.tokens.v[first], 0, int(args.vocabulary) - 1));
    if (args.accumulate != 0) sum = load4(args.out_rows, id * cols, c, cols) + sum;
    store4(args.out_rows, id * cols, c, cols, sum);
}
