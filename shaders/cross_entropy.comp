// lse = log(sum(exp(x))) and loss = lse - x[target] of each row, in one pass with a running maximum (Milakov and
// Gimelshein 2018). Nothing overflows, and entries of -inf count as absent.
#include "rows.glsl"
#include "exp.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const int target = args.targets.v[row];
    if (target == args.ignore_index) {
        if (subgroupElect()) {
            args.loss.v[row] = 0.0;
            args.lse.v[row] = 0.0;
        }
        return;
    }
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    float largest = NEGATIVE_INFINITY, sum = 0.0;
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        vec4 x = inside4(load4(args.logits, start, c, cols), vec4(NEGATIVE_INFINITY), c, cols);
        float next = max(largest, max(max(x.x, x.y), max(x.z, x.w)));
        float shift = next == NEGATIVE_INFINITY ? 0.0 : next; // -inf minus -inf would be NaN
        sum = fma(sum, exp_or_zero(largest - shift), sum4(exp_or_zero(x - shift)));
        largest = next;
    }
    const float row_largest = subgroupMax(largest);
    const float shift = row_largest == NEGATIVE_INFINITY ? 0.0 : row_largest;
    const float total = subgroupAdd(sum * exp_or_zero(largest - shift));
    // A target outside the row has no loss: NaN, which stops the step.
    const bool valid = target >= 0 && uint(target) < cols;
    if (subgroupElect()) {
        float log_total = log_or_nan(total);
        float x = uintBitsToFloat(0x7FC00000u);
        if (valid) x = load1(args.logits, start + uint(target));
        args.loss.v[row] = (shift - x) + log_total;
        args.lse.v[row] = shift + log_total;
    }
}
