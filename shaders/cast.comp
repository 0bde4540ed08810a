// Converts a flat array; SOURCE and TARGET are 0 float32, 1 float16, 2 bfloat16, 3 int32. 16-bit elements lie two in a
// word; source_start (0 or 1) says in which half of its first word the source begins. A piece is two elements.
#include "float_bits.glsl"

uint read_float(uint i) { // element i as float32 bits
#if SOURCE == 1 || SOURCE == 2
    const uint place = i + args.source_start;
    const uint bits = (args.x.v[place >> 1] >> (16u * (place & 1u))) & 0xFFFFu;
#if SOURCE == 1
    return float_from_half(bits);
#else
    return bits << 16;
#endif
#elif SOURCE == 3
    return float_from_int(args.x.v[i]);
#else
    return args.x.v[i];
#endif
}

uint convert(uint i) {
#if TARGET == 1
    return half_from_float(read_float(i));
#elif TARGET == 2
    return bfloat_from_float(read_float(i));
#elif TARGET == 3
    return int_from_float(read_float(i));
#else
    return read_float(i);
#endif
}

void piece(uint word) {
    if (word > (args.n - 1) >> 1) return;
    const uint i = 2 * word;
    const bool second = i + 1 < args.n;
#if TARGET == 1 || TARGET == 2
    uint bits = convert(i);
    if (second) bits |= convert(i + 1) << 16;
    args.y.v[word] = bits;
#else
    args.y.v[i] = convert(i);
    if (second) args.y.v[i + 1] = convert(i + 1);
#endif
}

#include "pieces.glsl"
