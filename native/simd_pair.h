// Sixteen lanes as two vectors of eight: the rows of two panels side by side, for instruction sets whose registers hold
// eight. Included by simd_scalar.h and simd_avx2.h, which say what a vector of eight is.
#pragma once

namespace {

struct F16 { F8 low, high; };
struct I16 { I8 low, high; };

inline F8 f_low(F16 a) { return a.low; }
inline F8 f_high(F16 a) { return a.high; }
inline F16 f_load16(const float* p) { return {f_load(p), f_load(p + 8)}; }
inline I16 i_load16(const int32_t* p) { return {i_load(p), i_load(p + 8)}; }
template <> struct Lanes<16> { using F = F16; using I = I16; };
template <> inline F16 f_all<16>(float x) { return {f_set1(x), f_set1(x)}; }
template <> inline I16 i_all<16>(int32_t x) { return {i_set1(x), i_set1(x)}; }
inline F16 f_mul(F16 a, F16 b) { return {f_mul(a.low, b.low), f_mul(a.high, b.high)}; }
inline F16 f_fma(F16 a, F16 b, F16 c) { return {f_fma(a.low, b.low, c.low), f_fma(a.high, b.high, c.high)}; }
inline F16 f_from_i(I16 a) { return {f_from_i(a.low), f_from_i(a.high)}; }
inline I16 i_add(I16 a, I16 b) { return {i_add(a.low, b.low), i_add(a.high, b.high)}; }
inline I16 i_sub(I16 a, I16 b) { return {i_sub(a.low, b.low), i_sub(a.high, b.high)}; }
inline I16 i_mul(I16 a, I16 b) { return {i_mul(a.low, b.low), i_mul(a.high, b.high)}; }
template <int N> inline I16 i_shl(I16 a) { return {i_shl<N>(a.low), i_shl<N>(a.high)}; }

}  // namespace
