// In place: logits become (softmax - onehot(target)) * loss_scale; rows with an ignored target become 0.
#include "rows.glsl"
#include "exp.glsl"

void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
    const int target = args.targets.v[row];
    const bool ignored = target == args.ignore_index;
    const bool valid = target >= 0 && uint(target) < cols;
    const float nan = uintBitsToFloat(0x7FC00000u);
    const float lse = args.lse.v[row];
    const float scale = valid ? args.step.loss_scale : nan;
    for (uint base = 0; base < cols; base += stride) {
        uint c = base + first;
        if (c >= cols) continue;
        vec4 gradient = vec4(0.0);
        if (!ignored) {
            vec4 x = load4(args.logits, start, c, cols);
            vec4 p = exp_or_zero(x - lse);
            p = mix(p, vec4(0.0), equal(x, vec4(NEGATIVE_INFINITY))); // also where the whole row is -inf
            vec4 onehot = vec4(equal(ivec4(c, c + 1, c + 2, c + 3), ivec4(target)));
            gradient = (p - onehot) * scale;
        }
        store4(args.logits, start, c, cols, gradient);
    }
}
