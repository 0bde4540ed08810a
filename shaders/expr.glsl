// Functions of expressions (engine/expr.py), for float and vec4: IEEE at the ends, where drivers clamp, take bits apart or
// promise nothing.
#include "exp.glsl"
#include "float_bits.glsl"

#define EXP_OVERFLOW 88.72284 // log of the largest float32

float exp_full(float x) {
    const float e = exp(clamp(x, EXP_FLUSH, EXP_OVERFLOW));
    return isnan(x) ? x : (x < EXP_FLUSH ? 0.0 : (x > EXP_OVERFLOW ? -NEGATIVE_INFINITY : e));
}

float log_full(float x) {
    if (x < 0.0) return uintBitsToFloat(0x7FC00000u);
    return isinf(x) ? x : log_or_nan(x);
}

float rsqrt_full(float x) {
    if (x < 0.0) return uintBitsToFloat(0x7FC00000u);
    if (isnan(x)) return x;
    return x == 0.0 ? -NEGATIVE_INFINITY : (isinf(x) ? 0.0 : inversesqrt(x));
}

float round_to_half(float x) { return uintBitsToFloat(float_from_half(half_from_float(floatBitsToUint(x)))); }
float round_to_bfloat(float x) { return uintBitsToFloat(bfloat_from_float(floatBitsToUint(x)) << 16); }

#define EACH_COMPONENT(F) vec4 F(vec4 x) { return vec4(F(x.x), F(x.y), F(x.z), F(x.w)); }
EACH_COMPONENT(exp_full)
EACH_COMPONENT(log_full)
EACH_COMPONENT(rsqrt_full)
EACH_COMPONENT(round_to_half)
EACH_COMPONENT(round_to_bfloat)
