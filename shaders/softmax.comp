// y = exp(x - max) / sum(exp(x - max)) of each row, with a running maximum (Milakov and Gimelshein 2018). An entry of
// -inf gives exactly 0; a row of nothing else gives zeros.
#include "rows.glsl"
#include "exp.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    float largest = NEGATIVE_INFINITY, sum = 0.0;
    for (uint base = 0; base < cols; base += stride) {
        const uint c = base + first;
        const vec4 x = inside4(load4(args.x, start, c, cols), vec4(NEGATIVE_INFINITY), c, cols);
        const float next = max(largest, max(max(x.x, x.y), max(x.z, x.w)));
        const float shift = next == NEGATIVE_INFINITY ? 0.0 : next; // -inf minus -inf would be NaN
        sum = fma(sum, exp_or_zero(largest - shift), sum4(exp_or_zero(x - shift)));
        largest = next;
    }
    const float row_largest = subgroupMax(largest);
    const float shift = row_largest == NEGATIVE_INFINITY ? 0.0 : row_largest;
    const float total = subgroupAdd(sum * exp_or_zero(largest - shift));
    const bool empty = total == 0.0;
    for (uint base = 0; base < cols; base += stride) {
        const uint c = base + first;
        const vec4 y = exp_or_zero(load4(args.x, start, c, cols) - shift) / (empty ? 1.0 : total);
        store4(args.y, start, c, cols, y);
    }
}
