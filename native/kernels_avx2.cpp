// The kernels for avx2. Compiled with that instruction set's flags; nothing here may be called without it.
#include "kernels.h"
#include "simd_avx2.h"
#define CUTAWAY_ISA_NAME "avx2"
#include "kernels.inl"

const cutaway::Kernels* cutaway::kernels_avx2() { return &table; }
