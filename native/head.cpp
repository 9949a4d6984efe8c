// The exact head: the k largest logits without reading every bit of the output matrix.
//
// A Q8_0 head is packed as two planes, weight + 128 = 8 h + l with 0 <= l <= 7. The high plane alone gives
//     a_i = sum_k d_ik (8 h_ik + 3.5 - 128) y_k
// and what is missing is e_i = sum_k d_ik (l_ik - 3.5) y_k. By Cauchy and Schwarz, in parts of the row,
//     |e_i| <= B_i = sum_parts R_ip |y|_p,   R_ip = |d (l - 3.5)| over the part, kept from packing.
// The k-th largest of a_i - B_i is a floor for the k-th largest logit, so a row with a_i + B_i below it cannot be among
// the k largest. Only the panels of the other rows are finished, by the same kernel as the full head: same bits.
// R_ip also covers float32 rounding: a logit is a sum of `groups` rounded terms, each at most |w| |y| over its group.
// Where too many rows are left, the full head is computed, and the next steps do not try.
#include <algorithm>
#include <atomic>
#include <functional>
#include <cstring>
#include <cmath>

#include "plan.h"

namespace cutaway {
namespace {

constexpr int kBlock = 64;            // rows whose best lower bound stands for them in the search for the floor
constexpr float kRounding = 3e-7f;    // of |w| |y|, for each group: 2^-24 a term, for both sums, with room
constexpr float kFinite = 1e30f;
constexpr float kLargest = 724.1f;    // >= sqrt(32) * 128: |w| of a group in units of d

// The groups of a part: [first_group(part), first_group(part + 1)).
inline int first_group(int part, int groups) { return part * groups / kHeadParts; }

}  // namespace

void measure_low_bits(Packed& packed, const Kernels& kernels, Pool& pool) {
    const Matrix& w = packed.w;
    packed.low_norm.reserve(static_cast<size_t>(8) * w.panels() * kHeadParts);
    const int groups = w.groups();
    const float rounding = kRounding * static_cast<float>(groups + 4);
    std::atomic<bool> finite{true};
    pool.run([&](int thread) {
        const Range mine = share(w.panels(), thread, pool.threads());
        for (int p = mine.begin; p < mine.end; ++p)
            for (int part = 0; part < kHeadParts; ++part) {
                float norm[8], scale[8];
                float* out = packed.low_norm.get() + static_cast<size_t>(part) * 8 * w.panels() + 8 * p;
                kernels.measure_low(w, p, first_group(part, groups), first_group(part + 1, groups), norm, scale);
                for (int r = 0; r < 8; ++r) {
                    out[r] = 1.00001f * (norm[r] + rounding * kLargest * scale[r]);
                    if (!(out[r] < kFinite)) finite = false;
                }
            }
    });
    if (!finite) packed.low_norm.release();  // a scale is infinite or NaN: no bound holds, so nothing is screened
}

bool Plan::screens(const Phase& p) const {
    if (p.kind != PhaseKind::Matmul || !p.outputs || p.linears.size() != 1) return false;
    const Packed& head = *p.linears[0].w;
    const auto known = screenings_.find(top_k_);
    if (known != screenings_.end() && known->second.pause > 0) return false;
    return int8_ && top_k_ > 0 && batch_.num_outputs == 1 && head.low_norm.bytes() && !p.linears[0].bias && head.w.panels() > 8 * top_k_ + 64;
}

void Plan::screen_head(const Phase& p, int thread) {
    const Packed& head = *p.linears[0].w;
    const Matrix& w = head.w;
    const int threads = pool_->threads(), rows = w.rows, padded = 8 * w.panels();
    const Input in = prepare(p, thread, 1, w.columns, true);

    float norm[kHeadParts];
    {
        for (int part = 0; part < kHeadParts; ++part) {
            double squares = 0;
            for (int g = first_group(part, w.groups()); g < first_group(part + 1, w.groups()); ++g) {
                int32_t sum = 0;
                for (int k = 0; k < 32; ++k) sum += in.codes[32 * g + k] * in.codes[32 * g + k];
                squares += static_cast<double>(in.sums[g].scale) * in.sums[g].scale * sum;
            }
            norm[part] = static_cast<float>(std::sqrt(squares) * 1.00001);
        }
    }
    const int blocks = (padded + kBlock - 1) / kBlock;
    const Range own = share(blocks, thread, threads);
    const int begin = own.begin * kBlock, end = std::min(own.end * kBlock, padded);
    float* a = high_.get();
    float* upper = a + padded;
    float* peaks = upper + padded;
    k_->matmul_high(w, begin / 8, end / 8, in.codes, in.sums, a);
    for (int i = begin; i < end; ++i) {
        float bound = 0.0f;
        for (int part = 0; part < kHeadParts; ++part) bound += head.low_norm.get()[static_cast<size_t>(part) * padded + i] * norm[part];
        upper[i] = a[i] + bound;
        a[i] -= bound;
    }
    for (int b = own.begin; b < own.end; ++b) peaks[b] = k_->max_value(a + b * kBlock, std::min(kBlock, std::min(rows, padded) - b * kBlock));
    pool_->barrier();

    std::vector<float> sorted(peaks, peaks + blocks);
    std::nth_element(sorted.begin(), sorted.begin() + (top_k_ - 1), sorted.end(), std::greater<float>());
    const float floor = sorted[top_k_ - 1];
    auto& mine = panels_left_[thread];
    mine.clear();
    for (int q = begin / 8; q < end / 8; ++q) {
        bool any = false;
        for (int r = 0; r < 8; ++r) any |= !(upper[8 * q + r] < floor);
        if (any) mine.push_back(q);
    }
    pool_->barrier();

    size_t left = 0;
    for (const auto& part : panels_left_) left += part.size();
    const bool full = left > static_cast<size_t>(w.panels()) / 4;
    MatmulArgs args{&w, 0, 0, 1, in.x, in.codes, in.sums, nullptr, nullptr, buffer(p.linears[0].out)};
    if (full) {
        args.panel_begin = begin / 8;
        args.panel_end = end / 8;
        k_->matmul(args);
    } else {
        size_t i = 0;
        for (const auto& part : panels_left_)
            for (const int q : part)
                if (static_cast<int>(i++ % threads) == thread) {
                    args.panel_begin = q;
                    args.panel_end = q + 1;
                    k_->matmul(args);
                }
    }
    pool_->barrier();
    if (thread == 0) {
        head_rows_finished_ = full ? rows : static_cast<int64_t>(8 * left);
        screened_ = !full;
        Screening& state = screenings_[top_k_];
        if (full) state.retry = std::min(64, 2 * state.retry), state.pause = state.retry;
        else state.retry = 4;
        if (screened_) {
            std::vector<std::pair<float, int32_t>> all;
            for (const auto& part : panels_left_)
                for (const int q : part)
                    for (int r = 8 * q; r < std::min(8 * q + 8, rows); ++r) all.emplace_back(args.out[r], r);
            keep_top(0, all);
        }
    }
}

}  // namespace cutaway
