// Which kernels this processor can run.
#include <cstring>

#include "kernels.h"

namespace cutaway {
namespace {

#if defined(CUTAWAY_X86)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

}  // namespace

const Kernels* kernels_for(const char* isa) {
    const bool any = !isa || !*isa;
#if defined(CUTAWAY_X86)
    __builtin_cpu_init();
    if ((any || !std::strcmp(isa, "avx512vnni")) && has_avx512vnni()) return kernels_avx512vnni();
    if ((any || !std::strcmp(isa, "avx2")) && has_avx2()) return kernels_avx2();
#endif
    return any || !std::strcmp(isa, "scalar") ? kernels_scalar() : nullptr;
}

}  // namespace cutaway
