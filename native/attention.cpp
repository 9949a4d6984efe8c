// The attention phase of a plan: store the step's keys and values, then attend, one KV head of one token a task.
//
// A token's keys are walked in spans of kSpan; each span gives a partial result, and partial results are merged in
// rising order. That pattern depends on the token's position alone, so it does not matter which thread takes a span, nor
// whether a step has few tokens (spans are spread over the threads) or many (a task walks all spans of a few tokens).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan.h"

namespace cutaway {

// in = q, in2 = k, in3 = v, out. Fused: q and k are normalised and rotated on the way.
void Plan::attention(const Phase& p, int thread, bool store_only) {
    const int d = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads, threads = pool_->threads();
    const int tokens = batch_.num_tokens, group = heads / kv_heads;
    const KvLayer& kv = kv_[p.layer];
    std::vector<float> key(d);
    const Range stores = share(tokens * kv_heads, thread, threads);
    for (int i = stores.begin; i < stores.end; ++i) {  // one KV head of one token, and the query heads of its group
        const int t = i / kv_heads, h = i % kv_heads;
        const float* k = buffer(p.in2) + (static_cast<size_t>(t) * kv_heads + h) * d;
        if (p.rope) {
            const size_t angle = static_cast<size_t>(batch_.positions[t]) * (d / 2);
            float* q = buffer(p.in) + (static_cast<size_t>(t) * heads + h * group) * d;
            std::vector<float> rotated(d);
            for (int g = 0; g < group; ++g, q += d) {
                if (p.weight) k_->rms_norm(q, p.weight->data(), d, shape_.eps, q);
                k_->rope(q, cos_ + angle, sin_ + angle, d, rotated.data());
                std::memcpy(q, rotated.data(), sizeof(float) * d);
            }
            std::vector<float> normed(k, k + d);
            if (p.weight2) k_->rms_norm(k, p.weight2->data(), d, shape_.eps, normed.data());
            k_->rope(normed.data(), cos_ + angle, sin_ + angle, d, key.data());
            k = key.data();
        }
        k_->store_kv(kv, batch_.slots[t], h, k, buffer(p.in3) + (static_cast<size_t>(t) * kv_heads + h) * d);
    }
    if (store_only) return;
    pool_->barrier();

    Local& local = *locals_[thread];
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const int longest_spans = (longest_ + kSpan - 1) / kSpan;
    auto attend = [&](int t, int together, int h, int span, float* m, float* l, float* acc) {
        const int seq = seq_of_token_[t], keys = batch_.positions[t] + 1;
        const size_t row = static_cast<size_t>(heads) * d;
        k_->attend({&kv, batch_.block_tables + static_cast<size_t>(seq) * batch_.max_blocks, h, group, together, buffer(p.in) + t * row + static_cast<size_t>(h) * group * d, row,
                    scale, span * kSpan, std::min(keys, (span + 1) * kSpan), split_spans_, m, l, acc});
    };
    auto spans_of = [&](int t) { return (batch_.positions[t] + kSpan) / kSpan; };

    if (split_spans_) {
        int task = 0;
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < kv_heads; ++h)
                for (int s = 0; s < spans_of(t); ++s, ++task) {
                    if (task % threads != thread) continue;
                    const size_t at = ((static_cast<size_t>(t) * kv_heads + h) * longest_spans + s) * group;
                    attend(t, 1, h, s, partial_m_.get() + at, partial_l_.get() + at, partial_acc_.get() + at * d);
                }
        pool_->barrier();
        const Range mine = share(tokens * heads, thread, threads);
        for (int i = mine.begin; i < mine.end; ++i) {
            const int t = i / heads, h = i % heads / group, g = i % heads % group;
            const size_t at = (static_cast<size_t>(t) * kv_heads + h) * longest_spans * group + g;
            k_->merge_spans(partial_m_.get() + at, partial_l_.get() + at, partial_acc_.get() + at * d, spans_of(t), group, group * d, d, buffer(p.out) + static_cast<size_t>(i) * d);
        }
        return;
    }

    const size_t tile = static_cast<size_t>(kTokenTile) * group, rows_of_tile = tile * longest_spans;  // rows: [span, token, head]
    float *m = local.spans.get(), *l = m + rows_of_tile, *acc = l + rows_of_tile;
    const int most = std::max(1, kMaxRows / group);
    int task = 0;
    for (int s = 0; s < batch_.num_seqs; ++s)
        for (int first = batch_.query_starts[s]; first < batch_.query_starts[s + 1]; first += kTokenTile)
            for (int h = 0; h < kv_heads; ++h, ++task) {
                if (task % threads != thread) continue;
                const int last = std::min(first + kTokenTile, batch_.query_starts[s + 1]);
                for (int span = 0; span < spans_of(last - 1); ++span)
                    for (int t = first, together = 1; t < last; t += together) {
                        const bool whole = batch_.positions[t] + 1 >= (span + 1) * kSpan;  // for the tokens after it too
                        together = whole ? std::min(most, last - t) : 1;
                        if (span >= spans_of(t)) continue;
                        const size_t at = span * tile + static_cast<size_t>(t - first) * group;
                        attend(t, together, h, span, m + at, l + at, acc + at * d);
                    }
                for (int t = first; t < last; ++t)
                    for (int g = 0; g < group; ++g) {
                        const size_t at = static_cast<size_t>(t - first) * group + g;
                        k_->merge_spans(m + at, l + at, acc + at * d, spans_of(t), tile, tile * d, d,
                                        buffer(p.out) + (static_cast<size_t>(t) * heads + h * group + g) * d);
                    }
            }
}

}  // namespace cutaway
