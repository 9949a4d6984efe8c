// The vector words by their number of lanes, so that what a weight format adds is written once for eight and for sixteen.
// Included by simd_scalar.h and simd_avx2.h where F8, I8 and their words are known. Read next: simd_pair.h.
#pragma once

namespace {

template <int LANES> struct Lanes;
template <> struct Lanes<8> { using F = F8; using I = I8; };
template <int LANES> using FloatsOf = typename Lanes<LANES>::F;
template <int LANES> using IntsOf = typename Lanes<LANES>::I;
template <int LANES> inline FloatsOf<LANES> f_all(float x);
template <int LANES> inline IntsOf<LANES> i_all(int32_t x);
template <> inline F8 f_all<8>(float x) { return f_set1(x); }
template <> inline I8 i_all<8>(int32_t x) { return i_set1(x); }

}  // namespace
