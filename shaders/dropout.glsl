// Dropout of element(s) from `index` on. Word e % 4 of the block with counter (e / 4, step, micro-batch, site) and the
// seed as key belongs to element e: it is kept when the word is at least the threshold, p * 2^32.
#include "philox.glsl"

uvec4 dropout_words(StepParameters step, uint site, uint index) {
    return philox(uvec4(index >> 2, step.step, step.micro_batch, site), uvec2(step.seed_low, step.seed_high));
}

vec4 dropout(vec4 x, float factor, StepParameters step, uint site, uint index, uint threshold) {
    const uvec4 words = dropout_words(step, site, index);
    return mix(vec4(0.0), x * factor, greaterThanEqual(words, uvec4(threshold)));
}

float dropout(float x, float factor, StepParameters step, uint site, uint index, uint threshold) {
    return dropout_words(step, site, index)[index & 3u] >= threshold ? x * factor : 0.0;
}
