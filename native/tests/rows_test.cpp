// Kernels along a row, of any length down to none.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"

namespace test {
namespace {

using namespace cutaway;

void lengths(const Kernels& k, Random& random) {
    for (const int n : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 33, 64, 896, 1001}) {
        const size_t size = static_cast<size_t>(n);
        const Exact<float> a(random.floats(size, 20.0f)), b(random.floats(size));
        Exact<float> out(size);
        const std::string here = say({{"length", n}}, k.name);
        k.add(a.get(), b.get(), n, out.get());
        for (size_t i = 0; i < size; ++i) check(out[i] == a[i] + b[i], here + ": add");
        k.silu_mul(a.get(), b.get(), n, out.get());
        for (size_t i = 0; i < size; ++i) {
            const double expected = a[i] / (1 + std::exp(-static_cast<double>(a[i]))) * b[i];
            check(std::fabs(out[i] - expected) <= 1e-6 * std::fabs(expected) + 1e-37, here + ": silu_mul");
        }
        k.rms_norm(a.get(), b.get(), n, 1e-6f, out.get());
        double square = 0;
        for (size_t i = 0; i < size; ++i) square += static_cast<double>(a[i]) * a[i];
        for (size_t i = 0; i < size; ++i) {
            const double expected = a[i] / std::sqrt(square / n + 1e-6) * b[i];
            check(std::fabs(out[i] - expected) <= 1e-6 * std::fabs(expected) + 1e-37, here + ": rms_norm");
        }
        if (n) {
            float most = a[0];
            for (size_t i = 1; i < size; ++i) most = std::fmax(most, a[i]);
            check(k.max_value(a.get(), n) == most, here + ": max_value");
        }
    }
}

void rope(const Kernels& k, Random& random) {
    for (const int dim : {2, 8, 16, 24, 64, 128}) {
        const size_t half = static_cast<size_t>(dim / 2);
        const Exact<float> x(random.floats(2 * half)), cos(random.floats(half)), sin(random.floats(half));
        Exact<float> out(2 * half);
        k.rope(x.get(), cos.get(), sin.get(), dim, out.get());
        for (size_t i = 0; i < half; ++i) {
            check(std::fabs(out[i] - (x[i] * cos[i] - x[half + i] * sin[i])) < 1e-6f, std::string(k.name) + ": rope, first half");
            check(std::fabs(out[half + i] - (x[half + i] * cos[i] + x[i] * sin[i])) < 1e-6f, std::string(k.name) + ": rope, second half");
        }
    }
}

void int8(const Kernels& k, Random& random) {
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN(), largest = std::numeric_limits<float>::max();
    for (const int groups : {0, 1, 2, 3, 28}) {
        for (const float special : {0.0f, -0.0f, 1e-45f, 1e-38f, 127.0f, largest, -largest, infinity, -infinity, nan}) {
            const size_t size = 32 * static_cast<size_t>(groups);
            Exact<float> x(random.floats(size));
            for (size_t g = 0; g < size; g += 32) x[g + static_cast<size_t>(random.below(32))] = special;
            Exact<int8_t> codes(size);
            Exact<GroupSums> sums(size / 32);
            k.quantize(x.get(), static_cast<int>(size), codes.get(), sums.get());
            for (size_t g = 0; g < size / 32; ++g) {
                int sum = 0, low = 0, most = 0;
                for (size_t i = 0; i < 32; ++i) {
                    const int code = codes[32 * g + i];
                    sum += code, low += i < 16 ? code : 0;
                    most = std::max(most, std::abs(code));
                    if (std::isfinite(special)) check(std::fabs(x[32 * g + i] - static_cast<double>(sums[g].scale) * code) <= sums[g].scale * 0.5001, std::string(k.name) + ": a code is within half a step");
                }
                check(most <= 127 && (!std::isfinite(special) || most == 127), std::string(k.name) + ": codes reach 127 and not past it");
                check(sum == sums[g].sum && low == sums[g].sum_low, std::string(k.name) + ": sums of codes");
                check(std::isfinite(special) == std::isfinite(sums[g].scale), std::string(k.name) + ": what is not finite shows");
            }
        }
    }
}

}  // namespace

void rows() {
    Random random(2);
    for (const Kernels* k : every_isa()) {
        lengths(*k, random);
        rope(*k, random);
        int8(*k, random);
    }
}

}  // namespace test
