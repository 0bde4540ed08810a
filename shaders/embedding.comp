// A piece: four columns of one looked-up row, copied. Ids are clamped: no read outside the table.
#include "rows.glsl"

void piece(uint i) {
    const uint cols = args.cols, col_groups = (cols + 3) / 4;
    const uint token = i / col_groups;
    if (token >= args.num_tokens) return;
    const uint c = 4 * (i - token * col_groups);
    const uint id = uint(clamp(args.tokens.v[token], 0, int(args.vocabulary) - 1));
    store4(args.y, token * cols, c, cols, load4(args.table, id * cols, c, cols));
}

#include "pieces.glsl"
