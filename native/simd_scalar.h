// The vector words of kernels.inl in plain C++: eight floats, eight int32, thirty-two bytes, as arrays.
// It builds anywhere and is the plainest statement of what each word does. Read next: simd_avx2.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define CUTAWAY_INLINE inline

namespace {

struct F8 { float v[8]; };
struct I8 { int32_t v[8]; };
struct B32 { uint8_t v[32]; };

#define CUTAWAY_EACH(n) for (int i = 0; i < (n); ++i)

inline F8 f_load(const float* p) { F8 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void f_store(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 f_set1(float x) { F8 r; CUTAWAY_EACH(8) r.v[i] = x; return r; }
inline F8 f_zero() { return f_set1(0.0f); }
inline F8 f_add(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] += b.v[i]; return a; }
inline F8 f_sub(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] -= b.v[i]; return a; }
inline F8 f_mul(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] *= b.v[i]; return a; }
inline F8 f_div(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] /= b.v[i]; return a; }
inline F8 f_max(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F8 f_min(F8 a, F8 b) { CUTAWAY_EACH(8) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F8 f_abs(F8 a) { CUTAWAY_EACH(8) a.v[i] = std::fabs(a.v[i]); return a; }
inline F8 f_fma(F8 a, F8 b, F8 c) { CUTAWAY_EACH(8) c.v[i] += a.v[i] * b.v[i]; return c; }  // a * b + c
inline F8 f_round(F8 a) { CUTAWAY_EACH(8) a.v[i] = std::nearbyintf(a.v[i]); return a; }
inline F8 f_from_i(I8 a) { F8 r; CUTAWAY_EACH(8) r.v[i] = static_cast<float>(a.v[i]); return r; }
inline I8 f_to_i(F8 a) { I8 r; CUTAWAY_EACH(8) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i])); return r; }
inline F8 f_scale2(F8 a, F8 n) {  // a * 2^n
    CUTAWAY_EACH(8) a.v[i] = std::isnan(n.v[i]) ? n.v[i] : std::ldexp(a.v[i], static_cast<int>(n.v[i]));
    return a;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    uint32_t bits;
    if (exponent == 31) bits = sign | 0x7f800000u | (mantissa << 13);
    else if (exponent != 0) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else {
        const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24: subnormal
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline uint16_t float_to_half(float x) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
    if (bits < 0x38800000u) {                                               // below 2^-14: subnormal
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyintf(magnitude * 16777216.0f)));
    }
    const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline F8 f_load_half(const uint16_t* p) { F8 r; CUTAWAY_EACH(8) r.v[i] = half_to_float(p[i]); return r; }
inline void f_store_half(uint16_t* p, F8 a) { CUTAWAY_EACH(8) p[i] = float_to_half(a.v[i]); }
inline F8 f_load_bf16(const uint16_t* p) {
    F8 r;
    CUTAWAY_EACH(8) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        std::memcpy(&r.v[i], &bits, 4);
    }
    return r;
}

inline I8 i_set1(int32_t x) { I8 r; CUTAWAY_EACH(8) r.v[i] = x; return r; }
inline I8 i_add(I8 a, I8 b) { CUTAWAY_EACH(8) a.v[i] += b.v[i]; return a; }
inline I8 i_sub(I8 a, I8 b) { CUTAWAY_EACH(8) a.v[i] -= b.v[i]; return a; }
inline I8 i_mul(I8 a, I8 b) { CUTAWAY_EACH(8) a.v[i] *= b.v[i]; return a; }
template <int N> inline I8 i_shl(I8 a) { CUTAWAY_EACH(8) a.v[i] *= 1 << N; return a; }
inline I8 i_load(const int32_t* p) { I8 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void i_store(int32_t* p, I8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline I8 i_load_u8(const uint8_t* p) { I8 r; CUTAWAY_EACH(8) r.v[i] = p[i]; return r; }
inline I8 i_load_s8(const uint8_t* p) { I8 r; CUTAWAY_EACH(8) r.v[i] = static_cast<int8_t>(p[i]); return r; }

inline B32 b_load(const uint8_t* p) { B32 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void b_store(uint8_t* p, B32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline B32 b_or(B32 a, B32 b) { CUTAWAY_EACH(32) a.v[i] |= b.v[i]; return a; }
// Across the lanes: the largest, and sums whose order does not matter.
inline float f_largest(F8 a) { CUTAWAY_EACH(8) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0]; return a.v[0]; }
inline float f_total(F8 a) { float r = 0.0f; CUTAWAY_EACH(8) r += a.v[i]; return r; }
inline int32_t i_total(I8 a) { int32_t r = 0; CUTAWAY_EACH(8) r += a.v[i]; return r; }
inline void i_store_s8(int8_t* p, I8 a, I8 b, I8 c, I8 d) {  // 32 values in [-128, 127]
    CUTAWAY_EACH(8) p[i] = static_cast<int8_t>(a.v[i]), p[8 + i] = static_cast<int8_t>(b.v[i]), p[16 + i] = static_cast<int8_t>(c.v[i]), p[24 + i] = static_cast<int8_t>(d.v[i]);
}
inline I8 b_squares(B32 a) {  // the sum of squares of a lane's four bytes
    I8 r;
    CUTAWAY_EACH(8) r.v[i] = a.v[4 * i] * a.v[4 * i] + a.v[4 * i + 1] * a.v[4 * i + 1] + a.v[4 * i + 2] * a.v[4 * i + 2] + a.v[4 * i + 3] * a.v[4 * i + 3];
    return r;
}
// The bits of every byte moved by N (up for positive N), then masked: (byte << N) & MASK.
template <int N, int MASK> inline B32 b_field(B32 a) {
    CUTAWAY_EACH(32) a.v[i] = static_cast<uint8_t>((N >= 0 ? a.v[i] << (N > 0 ? N : 0) : a.v[i] >> (N < 0 ? -N : 0)) & MASK);
    return a;
}

// Eight rows times four activations: lane r gets sum over i of u[4 r + i] * y[i].
inline I8 dot4(B32 u, const int8_t* y) {
    I8 r;
    CUTAWAY_EACH(8) r.v[i] = u.v[4 * i] * y[0] + u.v[4 * i + 1] * y[1] + u.v[4 * i + 2] * y[2] + u.v[4 * i + 3] * y[3];
    return r;
}
template <int BITS> inline I8 dot16(const B32* u, const int8_t* y) {
    return i_add(i_add(dot4(u[0], y), dot4(u[1], y + 4)), i_add(dot4(u[2], y + 8), dot4(u[3], y + 12)));
}
template <int BITS> inline I8 dot32(const B32* u, const int8_t* y) {
    return i_add(dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16));
}
}  // namespace

#include "simd_lanes.h"
#include "simd_pair.h"

namespace {

// out[t] = sum over COLUMNS columns of u y[t], for the sixteen rows of two panels and T tokens; u holds 64 bytes for
// every four columns, 32 of each panel.
template <int BITS, int COLUMNS, int T>
inline void dot_tile(const uint8_t* u, const int8_t* const (&y)[T], I16 (&out)[T]) {
    for (int t = 0; t < T; ++t) {
        out[t] = i_all<16>(0);
        for (int j = 0; j < COLUMNS / 4; ++j)
            out[t] = i_add(out[t], I16{dot4(b_load(u + 64 * j), y[t] + 4 * j), dot4(b_load(u + 64 * j + 32), y[t] + 4 * j)});
    }
}
constexpr int kTileTokens = 2;
constexpr int kRegisters = 16;
constexpr int kAhead = 0;

// Codes as unpacked for products of 8-bit weights (weight + 128); `centre` is the offset left in the dot product.
inline B32 b_prepare8(B32 u) { return u; }
constexpr int kOffset8 = 128;

inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}
#undef CUTAWAY_EACH

}  // namespace
