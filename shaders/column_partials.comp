// First stage of a sum over rows: invocation (chunk, four columns) adds the rows of its chunk in order.
// KIND 0: x.  KIND 3: x * x.  KIND 1: dy * (x * rstd).  KIND 2: dy * ((x - mean) * rstd), and dy into a second array of partials.
#include "rows.glsl"
#include "turns.glsl"

#if VEC4
#define LOAD(p, row) load4_inside(p, (row) * cols, c)
#else
#define LOAD(p, row) load4(p, (row) * cols, c, cols)
#endif
#if KIND == 0
#define ADD(u) sum += LOAD(args.x, row + u)
#elif KIND == 3
#define ADD(u)                                 \
    {                                          \
        const vec4 x = LOAD(args.x, row + u);  \
        sum = fma(x, x, sum);                  \
    }
#elif KIND == 1
#define ADD(u) sum = fma(LOAD(args.dy, row + u), LOAD(args.x, row + u) * args.rstd.v[row + u], sum)
#else
#define ADD(u)                                                                                      \
    {                                                                                               \
        const vec4 dy = LOAD(args.dy, row + u);                                                     \
        sum = fma(dy, (LOAD(args.x, row + u) - args.mean.v[row + u]) * args.rstd.v[row + u], sum);  \
        plain_sum += dy;                                                                            \
    }
#endif

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
    uint row = chunk * args.chunk_rows;
    for (; end - row >= TURNS; row += TURNS) IN_TURNS(ADD)
#if TURNS > 1
    for (; row < end; row++) { ADD(0); }
#endif
    store4(args.partials, chunk * cols, c, cols, sum);
#if KIND == 2
    store4(args.partials, (args.chunks + chunk) * cols, c, cols, plain_sum);
#endif
}
