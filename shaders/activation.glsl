// Activations and their derivatives, for float and vec4. GELU is the tanh form (Hendrycks & Gimpel 2016) written with the
// logistic function: 0.5 (1 + tanh(u)) = logistic(2u). tanh itself overflows on real drivers. Kinds: 1 relu, 2 gelu, 3 silu.

#include "exp.glsl"

#define ACTIVATION_FUNCTIONS(T) \
/* logistic(x) in y, 1 - logistic(|x|) in t: exact at both ends, because nothing but 0 is divided there */ \
T logistic_tail(T x) { const T e = exp_or_zero(-abs(x)); return e / (1.0 + e); } \
T logistic(T x) { const T tail = logistic_tail(x); return mix(tail, 1.0 - tail, POSITIVE(x)); } \
T gelu_argument(T x) { return x * fma(x * x, T(2.0 * GELU_SCALE * 0.044715), T(2.0 * GELU_SCALE)); } \
T relu(T x) { return mix(x, T(0.0), NEGATIVE(x)); } \
T silu(T x) { return x * logistic(x); } \
T gelu(T x) { return x * logistic(gelu_argument(x)); } \
T relu_derivative(T x) { return mix(T(1.0), T(0.0), NOT_POSITIVE(x)); } \
T silu_derivative(T x) { \
    const T tail = logistic_tail(x), near = clamp(x, T(-200.0), T(200.0)); \
    return fma(near, tail * (1.0 - tail), mix(tail, 1.0 - tail, POSITIVE(x))); \
} \
T gelu_derivative(T x) { \
    const T u = gelu_argument(x), tail = logistic_tail(u), near = clamp(x, T(-30.0), T(30.0)); \
    const T slope = fma(near * near, T(6.0 * GELU_SCALE * 0.044715), T(2.0 * GELU_SCALE)); \
    return fma(near * slope, tail * (1.0 - tail), mix(tail, 1.0 - tail, POSITIVE(u))); \
} \
T activate(T x, uint kind) { \
    if (kind == 1u) return relu(x); \
    if (kind == 2u) return gelu(x); \
    if (kind == 3u) return silu(x); \
    return x; \
}

const float GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

#define POSITIVE(x) (x > 0.0)
#define NEGATIVE(x) (x < 0.0)
#define NOT_POSITIVE(x) (x <= 0.0)
ACTIVATION_FUNCTIONS(float)
#undef POSITIVE
#undef NEGATIVE
#undef NOT_POSITIVE
#define POSITIVE(x) greaterThan(x, vec4(0.0))
#define NEGATIVE(x) lessThan(x, vec4(0.0))
#define NOT_POSITIVE(x) lessThanEqual(x, vec4(0.0))
ACTIVATION_FUNCTIONS(vec4)
