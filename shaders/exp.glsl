// exp for arguments up to 0 or so: exactly 0 where the result would be subnormal (-inf included) and NaN for NaN. Drivers
// clamp the argument of exp, which turns exp(-inf) into a small number and may lose a NaN.
#define NEGATIVE_INFINITY uintBitsToFloat(0xFF800000u)
#define EXP_FLUSH -87.0 // just above log(2^-126) = -87.34

float exp_or_zero(float x) { return isnan(x) ? x : (x < EXP_FLUSH ? 0.0 : exp(max(x, EXP_FLUSH))); }

vec4 exp_or_zero(vec4 x) {
    vec4 e = mix(exp(max(x, vec4(EXP_FLUSH))), vec4(0.0), lessThan(x, vec4(EXP_FLUSH)));
    return mix(e, x, isnan(x));
}
