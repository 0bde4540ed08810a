// Conversions of number formats on the bits, in integer arithmetic: the same result on every driver, whatever it does
// with subnormals, NaN payloads or the rounding of packHalf2x16. Rounding is to nearest, ties to even.

uint half_from_float(uint bits) {
    const uint sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu); // NaN stays NaN
    if (magnitude >= 0x47800000u) return sign | 0x7C00u;                               // 2^16 and above
    if (magnitude >= 0x38800000u) { // normal: 65,520 and above round up into infinity by themselves
        uint rebased = magnitude - 0x38000000u;
        return sign | ((rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13);
    }
    if (magnitude < 0x33000000u) return sign; // below 2^-25
    const uint shift = 126u - (magnitude >> 23); // 14 .. 24
    const uint significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint kept = significand >> shift, rest = significand & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
    return sign | (kept + uint(rest > tie || (rest == tie && (kept & 1u) != 0)));
}

uint float_from_half(uint bits) {
    const uint sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3FFu;
    if (exponent == 31u) return sign | 0x7F800000u | (fraction << 13);
    if (exponent != 0u) return sign | ((exponent + 112u) << 23) | (fraction << 13);
    if (fraction == 0u) return sign;
    const uint top = uint(findMSB(fraction));
    return sign | ((top + 103u) << 23) | ((fraction << (23u - top)) & 0x7FFFFFu);
}

uint bfloat_from_float(uint bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (bits >> 16) | 0x40u; // a quiet NaN, payload cut
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

// Towards zero; saturates; 0 for NaN. On the bits: conversions out of range are undefined.
uint int_from_float(uint bits) {
    const uint magnitude = bits & 0x7FFFFFFFu;
    const bool negative = (bits >> 31) != 0u;
    if (magnitude > 0x7F800000u || magnitude < 0x3F800000u) return 0u;
    if (magnitude >= 0x4F000000u) return negative ? 0x80000000u : 0x7FFFFFFFu;
    const uint exponent = (magnitude >> 23) - 127u, significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint value = exponent >= 23u ? significand << (exponent - 23u) : significand >> (23u - exponent);
    return negative ? 0u - value : value;
}

uint float_from_int(uint value) {
    if (value == 0u) return 0u;
    const uint sign = value & 0x80000000u, magnitude = sign != 0u ? 0u - value : value;
    const uint top = uint(findMSB(magnitude));
    if (top <= 23u) return sign | ((top + 127u) << 23) | ((magnitude << (23u - top)) & 0x7FFFFFu);
    const uint shift = top - 23u, kept = magnitude >> shift, rest = magnitude & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
    const uint rounded = kept + uint(rest > tie || (rest == tie && (kept & 1u) != 0)); // 2^24 carries into the exponent
    return sign | (((top + 126u) << 23) + rounded);
}
