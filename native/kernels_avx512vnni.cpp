// The kernels for avx512vnni. Compiled with that instruction set's flags; nothing here may be called without it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says it of its own 512-bit intrinsics
#endif
#include "kernels.h"
#include "simd_avx2.h"
#define CUTAWAY_ISA_NAME "avx512vnni"
#include "kernels.inl"

const cutaway::Kernels* cutaway::kernels_avx512vnni() { return &table; }
