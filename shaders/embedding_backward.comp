// The first position of each id adds the gradient rows of all positions with that id, in order, and writes the table row.
#include "rows.glsl"

void main() {
    const uint cols = args.cols, col_groups = (cols + 3) / 4;
    const uint i = linear_index();
    const uint first = i / col_groups;
    if (first >= args.num_tokens || args.links.v[2 * first + 1] != 0) return;
    const uint c = 4 * (i - first * col_groups);
    vec4 sum = load4(args.dy, first * cols, c, cols);
    // Two loops because some drivers end a loop after 65,535 rounds.
    for (uint t = args.links.v[2 * first]; t != 0;) {
        for (uint k = 0; k < 1024 && t != 0; k++) {
            sum += load4(args.dy, t * cols, c, cols);
            t = args.links.v[2 * t];
        }
    }
    const uint id = uint(clamp(args.tokens.v[first], 0, int(args.vocabulary) - 1));
    if (args.accumulate != 0) sum = load4(args.out_rows, id * cols, c, cols) + sum;
    store4(args.out_rows, id * cols, c, cols, sum);
}
