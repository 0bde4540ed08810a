// exp and log as IEEE has them at the ends: drivers clamp or take bits apart, so that exp(-inf) may be a small number,
// exp(NaN) infinite (SwiftShader, as well as log(NaN) = 89.1).

#define NEGATIVE_INFINITY uintBitsToFloat(0xFF800000u)
#define EXP_FLUSH -87.0 // just above log(2^-126) = -87.34

// For arguments up to 0 or so: exactly 0 where the result would be subnormal.
float exp_or_zero(float x) { return isnan(x) ? x : (x < EXP_FLUSH ? 0.0 : exp(max(x, EXP_FLUSH))); }

vec4 exp_or_zero(vec4 x) {
    vec4 e = mix(exp(max(x, vec4(EXP_FLUSH))), vec4(0.0), lessThan(x, vec4(EXP_FLUSH)));
    return mix(e, x, isnan(x));
}

// For arguments from 0 on.
float log_or_nan(float x) { return isnan(x) ? x : (x == 0.0 ? NEGATIVE_INFINITY : log(x)); }
