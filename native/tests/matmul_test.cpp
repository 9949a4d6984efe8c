// Packing, unpacking and matrix products of every format.
#include <cmath>

#include "../pool.h"
#include "check.h"

namespace test {
namespace {

using namespace cutaway;

constexpr int kTokens[] = {1, 2, 3, 4, 5, 7, 8, 9, 65, 257};

struct Coded {
    Exact<int8_t> codes;
    Exact<GroupSums> sums;
};

Coded quantized(const Kernels& k, const Exact<float>& x, int tokens, int columns) {
    Coded c{Exact<int8_t>(x.size()), Exact<GroupSums>(x.size() / 32)};
    for (int t = 0; t < tokens; ++t) {
        const size_t at = static_cast<size_t>(t) * columns;
        k.quantize(x.get() + at, columns, c.codes.get() + at, c.sums.get() + at / 32);
    }
    return c;
}

Exact<float> part(const Exact<float>& x, size_t begin, size_t end) { return Exact<float>(std::vector<float>(x.get() + begin, x.get() + end)); }

// x w^T of `tokens` rows of x, shared out over `threads` ranges of panels.
Exact<float> product(const Kernels& k, const Matrix& w, const Exact<float>& x, bool int8, int threads, const float* bias = nullptr, const float* residual = nullptr) {
    const int tokens = static_cast<int>(x.size() / static_cast<size_t>(w.columns));
    Exact<float> out(static_cast<size_t>(tokens) * w.rows);
    const Coded coded = int8 ? quantized(k, x, tokens, w.columns) : Coded{Exact<int8_t>(size_t{0}), Exact<GroupSums>(size_t{0})};
    for (int t = 0; t < threads; ++t) {
        const int begin = w.panels() * t / threads, end = w.panels() * (t + 1) / threads;
        k.matmul({&w, begin, end, tokens, x.get(), int8 ? coded.codes.get() : nullptr, coded.sums.get(), bias, residual, out.get()});
    }
    return out;
}

std::vector<float> unpacked(const Kernels& k, const Matrix& w) {
    std::vector<float> values(static_cast<size_t>(w.rows) * w.columns);
    Exact<float> panel(8 * static_cast<size_t>(w.columns));
    for (int p = 0; p < w.panels(); ++p) {
        k.unpack_panel(w, p, panel.get());
        for (int r = 0; r < 8 && 8 * p + r < w.rows; ++r)
            for (int c = 0; c < w.columns; ++c) values[static_cast<size_t>(8 * p + r) * w.columns + c] = panel[static_cast<size_t>(8 * c + r)];
    }
    return values;
}

void one(const FormatInfo& f, int rows, int columns, bool many_tokens, Random& random) {
    const Exact<uint8_t> file(file_rows(f, rows, columns, random));
    const PackedMatrix packed(f, rows, columns, file);
    const Matrix& w = packed.w;
    const int most = many_tokens ? 129 : 5;
    const Exact<float> x(random.floats(static_cast<size_t>(most) * columns));
    const Exact<float> bias(random.floats(rows)), residual(random.floats(static_cast<size_t>(most) * rows));
    const std::vector<float> values = unpacked(*kernels_scalar(), w);
    const std::string where = say({{"rows", rows}, {"columns", columns}}, f.name);

    for (const bool int8 : {false, true}) {
        if (int8 && is_float(w.kind)) continue;
        std::vector<Exact<float>> by_isa;
        for (const Kernels* k : every_isa()) {
            const std::string here = where + (int8 ? " int8 " : " f32 ") + k->name;
            check(unpacked(*k, w) == values, here + ": unpacked values are those of plain code");
            by_isa.push_back(product(*k, w, x, int8, 1));
            const Exact<float>& whole = by_isa.back();
            for (int t = 0; t < most; ++t)  // against float64, int8 by its own codes
                for (int r = 0; r < rows; ++r) {
                    double sum = 0, size = 0;
                    for (int c = 0; c < columns; ++c) {
                        const double term = static_cast<double>(values[static_cast<size_t>(r) * columns + c]) * x[static_cast<size_t>(t) * columns + c];
                        sum += term, size += std::fabs(term);
                    }
                    double slack = 1e-5 * (size + 8);
                    if (int8)
                        for (int c = 0; c < columns; ++c) slack += std::fabs(values[static_cast<size_t>(r) * columns + c]) * (0.51 / 127);  // half a code each, |x| <= 1
                    check(std::fabs(whole[static_cast<size_t>(t) * rows + r] - sum) <= slack, here + ": the product");
                }
            for (const int tokens : kTokens) {
                if (tokens > most) break;
                const Exact<float> some = part(x, 0, static_cast<size_t>(tokens) * columns), expected = part(whole, 0, static_cast<size_t>(tokens) * rows);
                for (const int threads : {1, 2, 5}) check(product(*k, w, some, int8, threads).same_bits(expected), here + ": tokens and threads");
            }
            for (int t = 0; t < most; ++t)
                check(product(*k, w, part(x, static_cast<size_t>(t) * columns, static_cast<size_t>(t + 1) * columns), int8, 1)
                          .same_bits(part(whole, static_cast<size_t>(t) * rows, static_cast<size_t>(t + 1) * rows)),
                      here + ": a token alone");
            const Exact<float> added = product(*k, w, x, int8, 2, bias.get(), residual.get());
            for (int t = 0; t < most; ++t)
                for (int r = 0; r < rows; ++r) {
                    const size_t at = static_cast<size_t>(t) * rows + r;
                    const float with_bias = whole[at] + bias[static_cast<size_t>(r)];
                    check(added[at] == residual[at] + with_bias, here + ": bias and residual");
                }
        }
        if (by_isa.size() == 3) check(by_isa[1].same_bits(by_isa[2]), where + ": avx2 and avx512vnni");
    }
}

}  // namespace

void matmul() {
    Random random(1);
    for (const FormatInfo& f : kFormats) {
        if (f.group == 1) {
            for (const int columns : {1, 7, 8, 9, 16, 17, 31, 32, 33, 65})
                for (const int rows : {1, 8, 17}) one(f, rows, columns, columns == 33 && rows == 17, random);
        } else {
            for (const int groups : {1, 2, 3, 29})
                for (const int rows : {1, 7, 8, 9, 17}) {
                    if (groups == 29 && (f.group == 256 || rows != 9)) continue;
                    one(f, rows, groups * f.group, groups == 2 && rows == 17, random);
                }
            if (f.group == 256) one(f, 9, 4 * 256, false, random);  // more groups than a strip holds
        }
    }
}

}  // namespace test
