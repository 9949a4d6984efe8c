// All kernels, written once over the vector words of simd_*.h. Included by one translation unit an instruction set,
// inside that unit's own unnamed namespace, so no compiled function is shared between instruction sets.
// Read kernels.h first for formulas and shapes, panel.h for the layouts, then formats.inl.

namespace {

using namespace cutaway;

#include "formats.inl"
#include "rows.inl"
#include "matmul.inl"
#include "attention.inl"

float read_stream(const uint8_t* p, size_t bytes, bool ahead) {
    B32 a = b_load(p), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 128) {
        if (ahead) prefetch(p + i + 2048), prefetch(p + i + 2048 + 64);
        a = b_or(a, b_load(p + i)), b = b_or(b, b_load(p + i + 32)), c = b_or(c, b_load(p + i + 64)), d = b_or(d, b_load(p + i + 96));
    }
    uint8_t out[32];
    b_store(out, b_or(b_or(a, b), b_or(c, d)));
    return static_cast<float>(out[0]);
}

const Kernels table = {CUTAWAY_ISA_NAME, matmul, matmul_high, measure_low, unpack_panel, quantize, rms_norm, rope, silu_mul, add, store_kv, attend, merge_spans, max_value, read_stream};

}  // namespace
