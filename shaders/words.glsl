// Four floats in one access, or with WORDS64 in two accesses of 64 bits: lavapipe goes through the lanes one by one for each
// component, so half the components take little more than half the time. The bits are the same.
#if WORDS64
layout(buffer_reference, std430, buffer_reference_align = 16) buffer U64 { uint64_t v[]; };

vec4 read4(F32x4 p, uint i) {
    U64 words = U64(uvec2(p));
    return uintBitsToFloat(uvec4(unpackUint2x32(words.v[2 * i]), unpackUint2x32(words.v[2 * i + 1])));
}

void write4(F32x4 p, uint i, vec4 value) {
    U64 words = U64(uvec2(p));
    const uvec4 bits = floatBitsToUint(value);
    words.v[2 * i] = packUint2x32(bits.xy);
    words.v[2 * i + 1] = packUint2x32(bits.zw);
}
#else
vec4 read4(F32x4 p, uint i) { return p.v[i]; }
void write4(F32x4 p, uint i, vec4 value) { p.v[i] = value; }
#endif
