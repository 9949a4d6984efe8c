// The vector words of kernels.inl for AVX2 + FMA + F16C, and, where the compiler is allowed it, AVX-512 VNNI: 256-bit
// registers for one panel, 512-bit ones for two (the same bits: only exact integer sums are reached in another way).
//
// Products of unsigned weights and signed activations go through vpmaddubsw, whose int16 sums must not overflow:
// |y| <= 127, so a chain of n additions holds n * 2 * u_max * 127 <= 32767, that is 8 for 4-bit, 4 for 5-bit and
// 2 for 6-bit weights. 8-bit weights take the sign onto the activations instead. Read next: kernels.inl.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define CUTAWAY_INLINE inline __attribute__((always_inline))  // what a kernel is made of: a call would send its registers through memory

namespace {

using F8 = __m256;
struct I8 { __m256i v; };
struct B32 { __m256i v; };

inline F8 f_load(const float* p) { return _mm256_loadu_ps(p); }
inline void f_store(float* p, F8 a) { _mm256_storeu_ps(p, a); }
inline F8 f_set1(float x) { return _mm256_set1_ps(x); }
inline F8 f_zero() { return _mm256_setzero_ps(); }
inline F8 f_add(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 f_sub(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
inline F8 f_mul(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 f_div(F8 a, F8 b) { return _mm256_div_ps(a, b); }
inline F8 f_max(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline F8 f_min(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 f_abs(F8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F8 f_fma(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
inline F8 f_round(F8 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F8 f_from_i(I8 a) { return _mm256_cvtepi32_ps(a.v); }
inline I8 f_to_i(F8 a) { return {_mm256_cvtps_epi32(a)}; }
inline F8 f_scale2(F8 a, F8 n) {  // a * 2^n for a near 1 and whole n in [-126, 127]
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
// SAFETY: _mm_loadu_si128 and _mm256_loadu_si256 take any alignment; the casts only name the register's type.
inline F8 f_load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void f_store_half(uint16_t* p, F8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline F8 f_load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline I8 i_set1(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I8 i_add(I8 a, I8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I8 i_sub(I8 a, I8 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I8 i_mul(I8 a, I8 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
template <int N> inline I8 i_shl(I8 a) { return {_mm256_slli_epi32(a.v, N)}; }
inline I8 i_load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void i_store(int32_t* p, I8 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline I8 i_load_u8(const uint8_t* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))}; }
inline I8 i_load_s8(const uint8_t* p) { return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))}; }

inline B32 b_load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void b_store(uint8_t* p, B32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline B32 b_or(B32 a, B32 b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int N, int MASK> inline B32 b_field(B32 a) {  // 16-bit shifts: the mask drops what crossed a byte
    __m256i v = a.v;
    if constexpr (N > 0) v = _mm256_slli_epi16(v, N);
    if constexpr (N < 0) v = _mm256_srli_epi16(v, -N);
    return {_mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(MASK)))};
}

// Across the lanes: the largest, and sums whose order does not matter.
inline float f_largest(F8 a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float f_total(F8 a) {
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}
inline int32_t i_total(I8 a) {
    __m128i m = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
inline void i_store_s8(int8_t* p, I8 a, I8 b, I8 c, I8 d) {  // 32 values in [-128, 127]
    const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(a.v, b.v), _mm256_packs_epi32(c.v, d.v));  // by halves: a b c d, a b c d
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
inline I8 b_squares(B32 a) {  // the sum of squares of a lane's four bytes, each below 128
    return {_mm256_madd_epi16(_mm256_maddubs_epi16(a.v, a.v), _mm256_set1_epi16(1))};
}

inline int32_t word_of(const int8_t* y) {  // y[0..3]
    int32_t word;
    std::memcpy(&word, y, 4);
    return word;
}
inline __m256i four(const int8_t* y) { return _mm256_set1_epi32(word_of(y)); }  // y[0..3] in every lane

}  // namespace

#include "simd_lanes.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

// Sixteen lanes: the rows of two panels side by side, in one register.
struct F16 { __m512 v; };
struct I16 { __m512i v; };

inline F8 f_low(F16 a) { return _mm512_castps512_ps256(a.v); }
inline F8 f_high(F16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline F16 f_load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline I16 i_load16(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
template <> struct Lanes<16> { using F = F16; using I = I16; };
template <> inline F16 f_all<16>(float x) { return {_mm512_set1_ps(x)}; }
template <> inline I16 i_all<16>(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 f_mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 f_fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 f_from_i(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 i_add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 i_sub(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I16 i_mul(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int N> inline I16 i_shl(I16 a) { return {_mm512_slli_epi32(a.v, N)}; }

template <int BITS> CUTAWAY_INLINE I8 dot16(const B32* u, const int8_t* y) {
    __m256i a = _mm256_dpbusd_epi32(_mm256_setzero_si256(), u[0].v, four(y));
    __m256i b = _mm256_dpbusd_epi32(_mm256_setzero_si256(), u[1].v, four(y + 4));
    a = _mm256_dpbusd_epi32(a, u[2].v, four(y + 8));
    b = _mm256_dpbusd_epi32(b, u[3].v, four(y + 12));
    return {_mm256_add_epi32(a, b)};
}
template <int BITS> CUTAWAY_INLINE I8 dot32(const B32* u, const int8_t* y) {
    __m256i a = _mm256_dpbusd_epi32(_mm256_setzero_si256(), u[0].v, four(y));
    __m256i b = _mm256_dpbusd_epi32(_mm256_setzero_si256(), u[1].v, four(y + 4));
    a = _mm256_dpbusd_epi32(a, u[2].v, four(y + 8));
    b = _mm256_dpbusd_epi32(b, u[3].v, four(y + 12));
    a = _mm256_dpbusd_epi32(a, u[4].v, four(y + 16));
    b = _mm256_dpbusd_epi32(b, u[5].v, four(y + 20));
    a = _mm256_dpbusd_epi32(a, u[6].v, four(y + 24));
    b = _mm256_dpbusd_epi32(b, u[7].v, four(y + 28));
    return {_mm256_add_epi32(a, b)};
}
template <int BITS, int COLUMNS, int T>
CUTAWAY_INLINE void dot_tile(const uint8_t* u, const int8_t* const (&y)[T], I16 (&out)[T]) {
    for (int t = 0; t < T; ++t) out[t].v = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS / 4; ++j) {
        const __m512i w = _mm512_load_si512(u + 64 * j);
        for (int t = 0; t < T; ++t) out[t].v = _mm512_dpbusd_epi32(out[t].v, w, _mm512_set1_epi32(word_of(y[t] + 4 * j)));
    }
}
constexpr int kTileTokens = 4;
constexpr int kRegisters = 32;
constexpr int kAhead = 0;  // these processors' own prefetchers do better alone
inline B32 b_prepare8(B32 u) { return u; }
constexpr int kOffset8 = 128;

#else

inline __m256i pairs(B32 u, const int8_t* y) { return _mm256_maddubs_epi16(u.v, four(y)); }
inline __m256i widen(__m256i s) { return _mm256_madd_epi16(s, _mm256_set1_epi16(1)); }
// Signed 8-bit weights: |w| * (y with the sign of w).
inline __m256i signed_pairs(B32 w, const int8_t* y) {
    return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(four(y), w.v)));
}
template <int BITS> CUTAWAY_INLINE I8 dot16(const B32* u, const int8_t* y) {
    if constexpr (BITS == 8) {
        return {_mm256_add_epi32(_mm256_add_epi32(signed_pairs(u[0], y), signed_pairs(u[1], y + 4)),
                                 _mm256_add_epi32(signed_pairs(u[2], y + 8), signed_pairs(u[3], y + 12)))};
    } else {
        const __m256i a = _mm256_add_epi16(pairs(u[0], y), pairs(u[1], y + 4));
        const __m256i b = _mm256_add_epi16(pairs(u[2], y + 8), pairs(u[3], y + 12));
        if constexpr (BITS <= 5) return {widen(_mm256_add_epi16(a, b))};
        else return {_mm256_add_epi32(widen(a), widen(b))};
    }
}
template <int BITS> CUTAWAY_INLINE I8 dot32(const B32* u, const int8_t* y) {
    if constexpr (BITS <= 4) {
        const __m256i a = _mm256_add_epi16(_mm256_add_epi16(pairs(u[0], y), pairs(u[1], y + 4)),
                                           _mm256_add_epi16(pairs(u[2], y + 8), pairs(u[3], y + 12)));
        const __m256i b = _mm256_add_epi16(_mm256_add_epi16(pairs(u[4], y + 16), pairs(u[5], y + 20)),
                                           _mm256_add_epi16(pairs(u[6], y + 24), pairs(u[7], y + 28)));
        return {widen(_mm256_add_epi16(a, b))};
    } else {
        return i_add(dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16));
    }
}

}  // namespace

#include "simd_pair.h"

namespace {

template <int BITS, int COLUMNS, int T>
CUTAWAY_INLINE void dot_tile(const uint8_t* u, const int8_t* const (&y)[T], I16 (&out)[T]) {
    constexpr int kChain = BITS == 8 ? 1 : BITS == 6 ? 2 : BITS == 5 ? 4 : COLUMNS / 4;  // additions int16 can hold
#pragma GCC unroll 8
    for (int first = 0; first < COLUMNS / 4; first += kChain) {
        __m256i chain[2][T];
#pragma GCC unroll 8
        for (int j = first; j < first + kChain; ++j) {
            B32 w[2];
            for (int p = 0; p < 2; ++p) w[p] = b_load(u + 64 * j + 32 * p);
            for (int t = 0; t < T; ++t) {
                const __m256i four_y = four(y[t] + 4 * j);
                for (int p = 0; p < 2; ++p) {
                    __m256i product;
                    if constexpr (BITS == 8) product = _mm256_maddubs_epi16(_mm256_abs_epi8(w[p].v), _mm256_sign_epi8(four_y, w[p].v));
                    else product = _mm256_maddubs_epi16(w[p].v, four_y);
                    chain[p][t] = j == first ? product : _mm256_add_epi16(chain[p][t], product);
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            const I16 wide{{widen(chain[0][t])}, {widen(chain[1][t])}};
            out[t] = first == 0 ? wide : i_add(out[t], wide);
        }
    }
}
constexpr int kTileTokens = 2;
constexpr int kRegisters = 16;
constexpr int kAhead = 3072;  // bytes the weight stream is fetched ahead
inline B32 b_prepare8(B32 u) { return {_mm256_xor_si256(u.v, _mm256_set1_epi8(static_cast<char>(0x80)))}; }
constexpr int kOffset8 = 0;

#endif

inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
