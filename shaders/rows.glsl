// One subgroup a row, columns in groups of four. With VEC4 a group is one 16-byte load; without it (row starts that are
// not 16-byte aligned) the same four values come one by one. Both variants add in the same order: equal bits. Kernel
// arguments of type "row" are Row here.
#if VEC4
#include "words.glsl"
#define Row F32x4
#else
#define Row F32
#endif

uint subgroup_row() { return group_index() * gl_NumSubgroups + gl_SubgroupID; }

uint linear_index() { return group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x; }

// Columns c .. c+3 of the row that starts at element `start`; 0 from column `cols` on.
vec4 load4(Row p, uint start, uint c, uint cols) {
    if (c >= cols) return vec4(0.0);
#if VEC4
    return read4(p, (start + c) >> 2);
#else
    vec4 v = vec4(p.v[start + c], 0.0, 0.0, 0.0);
    if (c + 1 < cols) v.y = p.v[start + c + 1];
    if (c + 2 < cols) v.z = p.v[start + c + 2];
    if (c + 3 < cols) v.w = p.v[start + c + 3];
    return v;
#endif
}

// The same where all four columns are there.
vec4 load4_inside(Row p, uint start, uint c) {
#if VEC4
    return read4(p, (start + c) >> 2);
#else
    return vec4(p.v[start + c], p.v[start + c + 1], p.v[start + c + 2], p.v[start + c + 3]);
#endif
}

void store4_inside(Row p, uint start, uint c, vec4 v) {
#if VEC4
    write4(p, (start + c) >> 2, v);
#else
    p.v[start + c] = v.x;
    p.v[start + c + 1] = v.y;
    p.v[start + c + 2] = v.z;
    p.v[start + c + 3] = v.w;
#endif
}

// Element i.
float load1(Row p, uint i) {
#if VEC4
    vec4 v = p.v[i >> 2];
    return (i & 2) == 0 ? ((i & 1) == 0 ? v.x : v.y) : ((i & 1) == 0 ? v.z : v.w);
#else
    return p.v[i];
#endif
}

void store4(Row p, uint start, uint c, uint cols, vec4 v) {
    if (c >= cols) return;
#if VEC4
    write4(p, (start + c) >> 2, v);
#else
    p.v[start + c] = v.x;
    if (c + 1 < cols) p.v[start + c + 1] = v.y;
    if (c + 2 < cols) p.v[start + c + 2] = v.z;
    if (c + 3 < cols) p.v[start + c + 3] = v.w;
#endif
}

// v where the column exists, `otherwise` from column `cols` on.
vec4 inside4(vec4 v, vec4 otherwise, uint c, uint cols) {
#if VEC4
    return c < cols ? v : otherwise;
#else
    return mix(otherwise, v, lessThan(uvec4(c, c + 1, c + 2, c + 3), uvec4(cols)));
#endif
}

float sum4(vec4 v) { return (v.x + v.y) + (v.z + v.w); }

// The largest of a subgroup's numbers, NaN where any lane has met one: what max() makes of a NaN, GLSL does not say.
float max_or_nan(float largest_of_lane, bool met_nan) {
    const float m = subgroupMax(largest_of_lane);
    return subgroupAny(met_nan) ? uintBitsToFloat(0x7FC00000u) : m;
}
