// First stage of a sum over rows: invocation (chunk, four columns) adds the rows of its chunk in order.
// KIND 0: x.  KIND 3: x * x.  KIND 1: dy * (x * rstd).  KIND 2: dy * ((x - mean) * rstd), and dy into a second array of partials.
#include "rows.glsl"

void main() {
    const uint cols = args.cols, col_groups = (cols + 3) / 4;
    const uint i = linear_index();
    const uint chunk = i / col_groups;
    if (chunk >= args.chunks) return;
    const uint c = 4 * (i - chunk * col_groups);
    const uint end = min(args.rows, (chunk + 1) * args.chunk_rows);
    vec4 sum = vec4(0.0);
#if KIND == 2
    vec4 plain_sum = vec4(0.0);
#endif
    for (uint row = chunk * args.chunk_rows; row < end; row++) {
        vec4 x = load4(args.x, row * cols, c, cols);
#if KIND == 0
        sum += x;
#elif KIND == 3
        sum = fma(x, x, sum);
#else
        vec4 dy = load4(args.dy, row * cols, c, cols);
#if KIND == 1
        sum = fma(dy, x * args.rstd.v[row], sum);
#else
        sum = fma(dy, (x - args.mean.v[row]) * args.rstd.v[row], sum);
        plain_sum += dy;
#endif
#endif
    }
    store4(args.partials, chunk * cols, c, cols, sum);
#if KIND == 2
    store4(args.partials, (args.chunks + chunk) * cols, c, cols, plain_sum);
#endif
}
