// The kernels for scalar. Compiled with that instruction set's flags; nothing here may be called without it.
#include "kernels.h"
#include "simd_scalar.h"
#define CUTAWAY_ISA_NAME "scalar"
#include "kernels.inl"

const cutaway::Kernels* cutaway::kernels_scalar() { return &table; }
