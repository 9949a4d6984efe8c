#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "pack.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace cutaway {
namespace {

constexpr int kRedundant = 2048;  // values so few that every thread prepares them for itself instead of meeting at a barrier

void require(bool fine, const char* what) {
    if (!fine) throw std::invalid_argument(what);
}

bool larger(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
}

}  // namespace

void drop_pages(const uint8_t* begin, const uint8_t* end) {
#if defined(__linux__)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page, last = reinterpret_cast<uintptr_t>(end) / page * page;
    // SAFETY: whole pages of a file mapping that nobody writes to; the caller says so with `mapped`.
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)begin, (void)end;
#endif
}

void* allocate(size_t bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t unit = bytes >= 2 * kHuge ? kHuge : 64;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    void* p = std::aligned_alloc(unit, rounded ? rounded : unit);
    if (!p) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (unit == kHuge) madvise(p, rounded, MADV_HUGEPAGE);
#endif
    return p;
}

size_t packed_bytes(const std::string& format, int rows, int columns) {
    Matrix w{Kind::F32, rows, columns};
    if (!kind_of(format, &w.kind)) return 0;
    auto rounded = [](size_t n) { return (n + 63) / 64 * 64; };
    return rounded(w.panels() * w.panel_bytes()) + rounded(w.panels() * w.low_panel_bytes());
}

std::shared_ptr<Packed> pack_matrix(const std::string& format, const uint8_t* data, int rows, int columns, bool mapped, Pool& pool, std::shared_ptr<Arena> arena) {
    auto packed = std::make_shared<Packed>();
    Matrix& w = packed->w;
    w.rows = rows;
    w.columns = columns;
    require(kind_of(format, &w.kind), "no kernel for this weight format");
    const size_t stride = row_bytes(format, columns);
    require(stride > 0, "columns are not a multiple of the format's group");
    w.data = arena->take(w.panels() * w.panel_bytes());
    if (w.low_panel_bytes()) w.low = arena->take(w.panels() * w.low_panel_bytes());
    packed->arena = std::move(arena);
    pool.run([&](int thread) {
        const Range mine = share(w.panels(), thread, pool.threads());
        const uint8_t* kept = data + 8 * mine.begin * stride;  // source pages from here on are still resident
        for (int p = mine.begin; p < mine.end; ++p) {
            const uint8_t* source[8];
            for (int r = 0; r < 8; ++r) source[r] = 8 * p + r < rows ? data + (8 * static_cast<size_t>(p) + r) * stride : nullptr;
            pack_panel(format, w, source, w.data + p * w.panel_bytes(), w.low ? w.low + p * w.low_panel_bytes() : nullptr);
            const uint8_t* end = data + std::min(8 * static_cast<size_t>(p + 1), static_cast<size_t>(rows)) * stride;
            if (mapped && (end - kept > (1 << 20) || p + 1 == mine.end)) {
                drop_pages(kept, end);
                kept = end;
            }
        }
    });
    return packed;
}

Plan::Plan(const Kernels* kernels, std::shared_ptr<Pool> pool, const Shape& shape, bool int8_activations)
    : k_(kernels), pool_(std::move(pool)), shape_(shape), int8_(int8_activations) {
    for (int t = 0; t < pool_->threads(); ++t) locals_.push_back(std::make_unique<Local>());
    candidates_.resize(pool_->threads());
    panels_left_.resize(pool_->threads());
}

int Plan::add_buffer(int width, bool outputs) {
    buffers_.push_back({width, outputs, {}});
    return static_cast<int>(buffers_.size()) - 1;
}

int Plan::add_phase(Phase phase) {
    phases_.push_back(std::move(phase));
    return static_cast<int>(phases_.size()) - 1;
}

size_t Plan::scratch_bytes() const {
    size_t total = normed_.bytes() + codes_.bytes() + sums_.bytes() + partial_m_.bytes() + partial_l_.bytes() + partial_acc_.bytes() + high_.bytes();
    for (const Buffer& b : buffers_) total += b.data.bytes();
    for (const auto& l : locals_) total += l->normed.bytes() + l->spans.bytes() + l->panel.bytes() + l->codes.bytes() + l->sums.bytes();
    return total;
}

void Plan::begin(const BatchView& b, int head_top_k) {
    require(b.num_tokens > 0 && b.num_seqs > 0, "batch: no tokens");
    require(b.query_starts[0] == 0 && b.query_starts[b.num_seqs] == b.num_tokens, "batch: query_starts do not cover the tokens");
    require(!kv_.empty(), "no KV cache bound");
    const int block_size = kv_[0].block_size;
    seq_of_token_.resize(b.num_tokens);
    longest_ = 0;
    for (int s = 0; s < b.num_seqs; ++s) {
        const int begin = b.query_starts[s], end = b.query_starts[s + 1], length = b.context_lengths[s];
        require(begin < end && end <= b.num_tokens, "batch: query_starts do not rise to the number of tokens");
        require(length >= end - begin && length <= rope_positions_, "batch: context length out of range");
        require((length + block_size - 1) / block_size <= b.max_blocks, "batch: block table too short for the context");
        for (int i = 0; i * block_size < length; ++i) {
            const int block = b.block_tables[static_cast<size_t>(s) * b.max_blocks + i];
            require(block >= 0 && block < num_blocks_, "batch: block out of range");
        }
        for (int t = begin; t < end; ++t) {
            const int position = length - (end - t);
            require(b.positions[t] == position, "batch: positions are not consecutive up to the context length");
            require(b.slots[t] == b.block_tables[static_cast<size_t>(s) * b.max_blocks + position / block_size] * block_size + position % block_size,
                    "batch: slot is not the position's place in the block table");
            seq_of_token_[t] = s;
        }
        longest_ = std::max(longest_, length);
    }
    for (int t = 0; t < b.num_tokens; ++t) require(b.token_ids[t] >= 0 && b.token_ids[t] < embedding_.rows, "batch: token id outside the vocabulary");
    for (int r = 0; r < b.num_outputs; ++r) require(b.output_rows[r] >= 0 && b.output_rows[r] < b.num_tokens, "batch: output row out of range");
    batch_ = b;
    for (Phase& p : phases_) p.ns.clear();
    top_k_ = std::min(head_top_k, embedding_.rows);
    screened_ = screening_ = false;
    head_rows_finished_ = 0;
    split_spans_ = b.num_tokens * shape_.num_kv_heads < 4 * pool_->threads();

    std::vector<bool> used(buffers_.size());
    auto use = [&](int id) { if (id >= 0) used[id] = true; };
    for (const Phase& p : phases_) {
        use(p.in), use(p.in2), use(p.in3), use(p.out);
        if (!gated(p)) for (const Linear& l : p.linears) use(l.out), use(l.residual);
    }
    for (size_t i = 0; i < buffers_.size(); ++i)
        if (used[i]) buffers_[i].data.reserve(static_cast<size_t>(buffers_[i].outputs ? b.num_outputs : b.num_tokens) * buffers_[i].width + 8);
    size_t widest = 0;
    for (const Phase& p : phases_) {
        if (p.kind == PhaseKind::Matmul) widest = std::max<size_t>(widest, p.linears[0].w->w.columns);
        if (screens(p)) screening_ = true, high_.reserve(17 * static_cast<size_t>(p.linears[0].w->w.panels()) + 64);
    }
    if (top_k_ > 0 && screenings_[top_k_].pause > 0) --screenings_[top_k_].pause;
    const size_t tokens = b.num_tokens, padded = (widest + 31) / 32 * 32;
    normed_.reserve(tokens * widest);
    codes_.reserve(tokens * padded);
    sums_.reserve(tokens * padded / 32);
    const size_t spans = (longest_ + kSpan - 1) / kSpan;
    if (split_spans_) {
        partial_m_.reserve(tokens * shape_.num_heads * spans);
        partial_l_.reserve(tokens * shape_.num_heads * spans);
        partial_acc_.reserve(tokens * shape_.num_heads * spans * shape_.head_dim);
    }
    for (auto& local : locals_) {
        local->normed.reserve(kRedundant + widest);
        local->codes.reserve(kRedundant + padded);
        local->sums.reserve((kRedundant + padded) / 32);
        local->spans.reserve(static_cast<size_t>(kTokenTile) * (shape_.num_heads / shape_.num_kv_heads) * spans * (shape_.head_dim + 2));
        local->panel.reserve(8 * static_cast<size_t>((std::max<size_t>(embedding_.columns, widest) + 31) / 32 * 32));
    }
}

void Plan::run(int first, int last, bool profile, bool store_only) {
    using clock = std::chrono::steady_clock;
    pool_->run([&](int thread) {
        for (int i = first; i < last; ++i) {
            const auto start = profile && thread == 0 ? clock::now() : clock::time_point{};
            execute(phases_[i], thread, store_only && i + 1 == last);
            if (i + 1 < last || profile) pool_->barrier();
            if (profile && thread == 0) phases_[i].ns.assign(1, std::chrono::duration<double, std::nano>(clock::now() - start).count());
        }
    });
}

void Plan::execute(const Phase& p, int thread, bool store_only) {
    const int threads = pool_->threads(), n = rows(p);
    switch (p.kind) {
        case PhaseKind::Embed: return embed(p, thread);
        case PhaseKind::Matmul: return screening_ && p.outputs ? screen_head(p, thread) : matmul(p, thread);
        case PhaseKind::Attention: return attention(p, thread, store_only);
        case PhaseKind::TopHead: return screened_ ? void() : top_head(p, thread);
        case PhaseKind::SelectRows: {
            const Range mine = share(n, thread, threads);
            for (int r = mine.begin; r < mine.end; ++r)
                std::memcpy(buffer(p.out) + static_cast<size_t>(r) * p.width, buffer(p.in) + static_cast<size_t>(batch_.output_rows[r]) * p.width, sizeof(float) * p.width);
            return;
        }
        default: break;
    }
    const Range mine = share(n, thread, threads);
    for (int t = mine.begin; t < mine.end; ++t) {
        const size_t at = static_cast<size_t>(t) * p.width;
        const float* x = buffer(p.in) + at;
        float* out = buffer(p.out) + at;
        const int d = shape_.head_dim;
        switch (p.kind) {
            case PhaseKind::Norm: k_->rms_norm(x, p.weight->data(), p.width, shape_.eps, out); break;
            case PhaseKind::HeadNorm:
                for (int h = 0; h < p.width; h += d) k_->rms_norm(x + h, p.weight->data(), d, shape_.eps, out + h);
                break;
            case PhaseKind::Rope: {
                const size_t angle = static_cast<size_t>(batch_.positions[t]) * (d / 2);
                for (int h = 0; h < p.width; h += d) k_->rope(x + h, cos_ + angle, sin_ + angle, d, out + h);
                break;
            }
            case PhaseKind::SiluMul: k_->silu_mul(x, buffer(p.in2) + at, p.width, out); break;
            case PhaseKind::Add: k_->add(x, buffer(p.in2) + at, p.width, out); break;
            default: break;
        }
    }
}

// Rows of the embedding table, eight tokens at a time through the same packing and unpacking as every matrix.
void Plan::embed(const Phase& p, int thread) {
    const Range mine = share(batch_.num_tokens, thread, pool_->threads(), 8);
    Matrix w{Kind::F32, 8, embedding_.columns};
    kind_of(embedding_.format, &w.kind);
    std::vector<uint8_t> panel(w.panel_bytes()), low(w.low_panel_bytes());
    w.data = panel.data();
    w.low = low.data();
    float* values = locals_[thread]->panel.get();
    for (int first = mine.begin; first < mine.end; first += 8) {
        const uint8_t* source[8];
        for (int r = 0; r < 8; ++r) source[r] = first + r < mine.end ? embedding_.data + batch_.token_ids[first + r] * embedding_.row_bytes : nullptr;
        pack_panel(embedding_.format, w, source, w.data, w.low);
        k_->unpack_panel(w, 0, values);
        for (int r = 0; first + r < mine.end && r < 8; ++r)
            for (int k = 0; k < w.columns; ++k) buffer(p.out)[static_cast<size_t>(first + r) * w.columns + k] = values[8 * k + r];
    }
}

// The input of a matrix product: normalised and quantised where asked. Few values are prepared by every thread for
// itself; many are shared out and the threads meet.
Plan::Input Plan::prepare(const Phase& p, int thread, int tokens, int columns, bool quantize) {
    Input in{buffer(p.in), nullptr, nullptr};
    if (!p.norm && !quantize) return in;
    const bool alone = static_cast<int64_t>(tokens) * columns <= kRedundant;
    Local& local = *locals_[thread];
    float* normed = alone ? local.normed.get() : normed_.get();
    int8_t* codes = alone ? local.codes.get() : codes_.get();
    GroupSums* sums = alone ? local.sums.get() : sums_.get();
    const Range mine = alone ? Range{0, tokens} : share(tokens, thread, pool_->threads());
    if (!alone && tokens == 1 && !p.norm && quantize) {  // one long row: share out its groups
        const Range groups = share(columns / 32, thread, pool_->threads());
        k_->quantize(in.x + 32 * groups.begin, 32 * (groups.end - groups.begin), codes + 32 * groups.begin, sums + groups.begin);
        pool_->barrier();
        return {in.x, codes, sums};
    }
    for (int t = mine.begin; t < mine.end; ++t) {
        const size_t at = static_cast<size_t>(t) * columns;
        const float* x = in.x + at;
        if (p.norm) {
            k_->rms_norm(x, p.weight->data(), columns, shape_.eps, normed + at);
            x = normed + at;
        }
        if (quantize) k_->quantize(x, columns, codes + at, sums + at / 32);
    }
    if (!alone) pool_->barrier();
    return {p.norm ? normed : in.x, quantize ? codes : nullptr, quantize ? sums : nullptr};
}

// True when gate, up and what is made of them are one product.
bool Plan::gated(const Phase& p) const {
    if (!p.silu || !int8_ || rows(p) <= kFewTokens) return false;
    const Kind kind = p.linears[0].w->w.kind;
    return !is_float(kind) && kind == p.linears[1].w->w.kind;
}

void Plan::matmul(const Phase& p, int thread) {
    const int tokens = rows(p), columns = p.linears[0].w->w.columns;
    bool quantize = false;
    for (const Linear& l : p.linears) quantize |= int8_ && !is_float(l.w->w.kind);
    const Input in = prepare(p, thread, tokens, columns, quantize);
    if (gated(p)) {
        const Linear &gate = p.linears[0], &up = p.linears[1];
        const Range mine = share(gate.w->w.panels(), thread, pool_->threads());
        k_->matmul({&gate.w->w, mine.begin, mine.end, tokens, in.x, in.codes, in.sums, gate.bias ? gate.bias->data() : nullptr, nullptr, buffer(p.out), &up.w->w, up.bias ? up.bias->data() : nullptr});
        return;
    }
    for (const Linear& l : p.linears) {
        const Range mine = share(l.w->w.panels(), thread, pool_->threads(), p.silu ? 4 : 1);
        const bool coded = int8_ && !is_float(l.w->w.kind);
        k_->matmul({&l.w->w, mine.begin, mine.end, tokens, in.x, coded ? in.codes : nullptr, in.sums, l.bias ? l.bias->data() : nullptr,
                    l.residual >= 0 ? buffer(l.residual) : nullptr, buffer(l.out)});
    }
    if (p.silu) {  // this thread's own columns of both products
        const int width = p.linears[0].w->w.rows;
        const Range mine = share(p.linears[0].w->w.panels(), thread, pool_->threads(), 4);
        const int begin = std::min(8 * mine.begin, width), end = std::min(8 * mine.end, width);
        for (int t = 0; t < tokens; ++t) {
            const size_t at = static_cast<size_t>(t) * width + begin;
            k_->silu_mul(buffer(p.linears[0].out) + at, buffer(p.linears[1].out) + at, end - begin, buffer(p.out) + at);
        }
    }
}

// The k largest logits of each output row, from the full logits in buffer `in`.
void Plan::top_head(const Phase& p, int thread) {
    const int vocab = p.width, k = top_k_;
    constexpr int kBlock = 64;
    std::vector<float> peaks;
    for (int r = 0; r < batch_.num_outputs; ++r) {
        const float* row = buffer(p.in) + static_cast<size_t>(r) * vocab;
        const Range mine = share(vocab, thread, pool_->threads(), kBlock);
        auto& found = candidates_[thread];
        found.clear();
        peaks.clear();
        for (int i = mine.begin; i < mine.end; i += kBlock) peaks.push_back(k_->max_value(row + i, std::min(kBlock, mine.end - i)));
        float floor = -INFINITY;  // at least k values of this share are no smaller
        if (static_cast<int>(peaks.size()) > k) {
            std::vector<float> sorted = peaks;
            std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
            floor = sorted[k - 1];
        }
        for (size_t b = 0; b < peaks.size(); ++b) {
            if (peaks[b] < floor) continue;
            const int begin = mine.begin + static_cast<int>(b) * kBlock, end = std::min(begin + kBlock, mine.end);
            for (int i = begin; i < end; ++i)
                if (!(row[i] < floor)) found.emplace_back(row[i], i);
        }
        pool_->barrier();
        if (thread == 0) {
            std::vector<std::pair<float, int32_t>> all;
            for (const auto& part : candidates_) all.insert(all.end(), part.begin(), part.end());
            keep_top(r, all);
        }
        pool_->barrier();
    }
}

// The top_k_ largest of `found` (value, id), which holds them all, become row `row` of the answer.
void Plan::keep_top(int row, std::vector<std::pair<float, int32_t>>& found) {
    const size_t k = top_k_, kept = std::min(k, found.size());
    std::partial_sort(found.begin(), found.begin() + kept, found.end(), larger);
    if (row == 0) {
        top_ids_.assign(batch_.num_outputs * k, -1);
        top_values_.assign(batch_.num_outputs * k, -INFINITY);
    }
    for (size_t i = 0; i < kept; ++i) top_ids_[row * k + i] = found[i].second, top_values_[row * k + i] = found[i].first;
}

}  // namespace cutaway
