// Random bits of element(s) from `index` on: word e % 4 of the block with counter (e / 4, step, micro-batch, site) and the
// seed as key belongs to element e, so float and vec4 kernels see the same.
#include "philox.glsl"

uvec4 random_words(StepParameters step, uint site, uint index) {
    return philox(uvec4(index >> 2, step.step, step.micro_batch, site), uvec2(step.seed_low, step.seed_high));
}

bvec4 random_below_vec4(StepParameters step, uint site, uint index, uint threshold) {
    return lessThan(random_words(step, site, index), uvec4(threshold));
}

bool random_below_float(StepParameters step, uint site, uint index, uint threshold) {
    return random_words(step, site, index)[index & 3u] < threshold;
}

vec4 uniform_vec4(StepParameters step, uint site, uint index) {
    return vec4(random_words(step, site, index) >> 8) * (1.0 / 16777216.0);
}

float uniform_float(StepParameters step, uint site, uint index) {
    return float(random_words(step, site, index)[index & 3u] >> 8) * (1.0 / 16777216.0);
}
