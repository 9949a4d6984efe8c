// A small decoder as a compiled plan: memory planned for a step is enough for it, and the results are the same bits
// token by token, in one piece, and on any number of threads. Batches that do not fit are refused.
#include "../plan.h"

#include <cmath>
#include <stdexcept>

#include "check.h"

namespace test {
namespace {

using namespace cutaway;

constexpr int kVocab = 803, kHidden = 64, kInter = 96, kHeads = 6, kKvHeads = 2, kDim = 32, kLayers = 2, kBlock = 16, kBlocks = 24, kContext = 330;

struct Model {
    std::shared_ptr<Pool> pool;
    std::vector<std::unique_ptr<Exact<uint8_t>>> files;
    std::vector<std::unique_ptr<Exact<uint8_t>>> memory;
    std::vector<std::unique_ptr<Exact<uint16_t>>> scales;
    Exact<float> cos{static_cast<size_t>(kContext * kDim / 2)}, sin{static_cast<size_t>(kContext * kDim / 2)};
    Plan plan;
    const Kernels* kernels;
    int logits = -1, phases = 0, top = -1;

    Model(const Kernels* k, int threads, bool int8, KvType kv, bool fused)
        : pool(std::make_shared<Pool>(threads)), plan(k, pool, {kHeads, kKvHeads, kDim, kLayers, 1e-6f}, int8), kernels(k) {
        Random random(7);  // the same weights every time
        for (size_t i = 0; i < cos.size(); ++i) {
            const float angle = static_cast<float>(i / (kDim / 2)) * std::pow(10000.0f, -static_cast<float>(i % (kDim / 2)) / (kDim / 2));
            cos[i] = std::cos(angle), sin[i] = std::sin(angle);
        }
        plan.set_rope(cos.get(), sin.get(), kContext);
        plan.set_embedding({"Q8_0", file("Q8_0", kVocab, kHidden, random), kVocab, kHidden, row_bytes("Q8_0", kHidden)});
        std::vector<KvLayer> layers;
        for (int i = 0; i < kLayers; ++i) {
            const size_t values = static_cast<size_t>(kBlocks) * kKvHeads * kDim * kBlock, bytes = values * (kv == KvType::F32 ? 4 : kv == KvType::F16 ? 2 : 1);
            for (int n = 0; n < 2; ++n) {
                memory.push_back(std::make_unique<Exact<uint8_t>>(bytes));
                std::memset(memory.back()->get(), 0xff, bytes);  // NaN
                scales.push_back(std::make_unique<Exact<uint16_t>>(values / 32));
                std::memset(scales.back()->get(), 0xff, 2 * scales.back()->size());
            }
            const size_t at = 2 * static_cast<size_t>(i);
            layers.push_back({memory[at]->get(), memory[at + 1]->get(), scales[at]->get(), scales[at + 1]->get(), kv, kv, kKvHeads, kDim, kBlock});
        }
        plan.bind_kv(std::move(layers), kBlocks);
        compile(random, fused);
    }

    const uint8_t* file(const char* format, int rows, int columns, Random& random) {
        for (const FormatInfo& f : kFormats)
            if (std::strcmp(f.name, format) == 0) files.push_back(std::make_unique<Exact<uint8_t>>(file_rows(f, rows, columns, random)));
        return files.back()->get();
    }
    std::shared_ptr<Packed> matrix(const char* format, int rows, int columns, Random& random) {
        const uint8_t* data = file(format, rows, columns, random);
        return pack_matrix(format, data, rows, columns, false, *pool, std::make_shared<Arena>(packed_bytes(format, rows, columns)));
    }
    static std::shared_ptr<std::vector<float>> vector(int n, float middle, Random& random) {
        auto v = std::make_shared<std::vector<float>>(random.floats(static_cast<size_t>(n), 0.3f));
        for (float& x : *v) x += middle;
        return v;
    }
    int norm(int in, const std::shared_ptr<std::vector<float>>& weight) {
        Phase p;
        p.kind = PhaseKind::Norm, p.in = in, p.out = plan.add_buffer(kHidden, false), p.weight = weight, p.width = kHidden;
        plan.add_phase(p);
        return p.out;
    }

    void compile(Random& random, bool fused) {
        const int x = plan.add_buffer(kHidden, false);
        Phase embed;
        embed.kind = PhaseKind::Embed, embed.out = x;
        plan.add_phase(embed);
        for (int layer = 0; layer < kLayers; ++layer) {
            const int q = plan.add_buffer(kHeads * kDim, false), k = plan.add_buffer(kKvHeads * kDim, false), v = plan.add_buffer(kKvHeads * kDim, false);
            const int mix = plan.add_buffer(kHeads * kDim, false), gate = plan.add_buffer(kInter, false), up = plan.add_buffer(kInter, false);
            Phase qkv;
            qkv.kind = PhaseKind::Matmul;
            const auto attn_norm = vector(kHidden, 1.0f, random);
            qkv.norm = fused;
            if (fused) qkv.in = x, qkv.weight = attn_norm;
            else qkv.in = norm(x, attn_norm);
            qkv.linears = {{matrix("Q5_0", kHeads * kDim, kHidden, random), vector(kHeads * kDim, 0.0f, random), q, -1},
                           {matrix("Q8_0", kKvHeads * kDim, kHidden, random), vector(kKvHeads * kDim, 0.0f, random), k, -1},
                           {matrix("F16", kKvHeads * kDim, kHidden, random), nullptr, v, -1}};
            plan.add_phase(qkv);
            Phase attention;
            attention.kind = PhaseKind::Attention, attention.in = q, attention.in2 = k, attention.in3 = v, attention.out = mix, attention.layer = layer, attention.rope = true;
            plan.add_phase(attention);
            Phase o;
            o.kind = PhaseKind::Matmul, o.in = mix, o.linears = {{matrix("Q4_0", kHidden, kHeads * kDim, random), nullptr, x, x}};
            plan.add_phase(o);
            Phase mlp;
            mlp.kind = PhaseKind::Matmul, mlp.norm = fused, mlp.silu = fused, mlp.out = gate;
            const auto mlp_norm = vector(kHidden, 1.0f, random);
            if (fused) mlp.in = x, mlp.weight = mlp_norm;
            else mlp.in = norm(x, mlp_norm);
            mlp.linears = {{matrix("Q4_1", kInter, kHidden, random), nullptr, gate, -1}, {matrix("Q5_1", kInter, kHidden, random), nullptr, up, -1}};
            plan.add_phase(mlp);
            if (!fused) {
                Phase silu;
                silu.kind = PhaseKind::SiluMul, silu.in = gate, silu.in2 = up, silu.out = gate, silu.width = kInter;
                plan.add_phase(silu);
            }
            Phase down;
            down.kind = PhaseKind::Matmul, down.in = gate, down.linears = {{matrix("Q8_0", kHidden, kInter, random), nullptr, x, x}};
            plan.add_phase(down);
        }
        const int rows = plan.add_buffer(kHidden, true);
        logits = plan.add_buffer(kVocab, true);
        Phase select;
        select.kind = PhaseKind::SelectRows, select.in = x, select.out = rows, select.width = kHidden, select.outputs = true;
        plan.add_phase(select);
        Phase head;
        head.kind = PhaseKind::Matmul, head.norm = true, head.in = rows, head.weight = vector(kHidden, 1.0f, random), head.outputs = true;
        head.linears = {{matrix("Q8_0", kVocab, kHidden, random), nullptr, logits, -1}};
        if (fused) measure_low_bits(*head.linears[0].w, *kernels, *pool);  // steps with one output row screen the head
        phases = plan.add_phase(head) + 1;
        Phase best;
        best.kind = PhaseKind::TopHead, best.in = logits, best.width = kVocab, best.outputs = true;
        top = plan.add_phase(best);
    }
};

struct Step {  // one sequence's tokens [begin, end), with logits of all of them
    Exact<int32_t> ids, positions, slots, starts, lengths, table, rows;
    Step(const std::vector<int>& text, int begin, int end)
        : ids(count(end - begin)), positions(count(end - begin)), slots(count(end - begin)), starts(2), lengths(1), table(count((end + kBlock - 1) / kBlock)), rows(count(end - begin)) {
        for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>((5 * i + 3) % kBlocks);
        for (int p = begin; p < end; ++p) {
            const size_t i = count(p - begin);
            ids[i] = text[count(p)], positions[i] = p, rows[i] = p - begin;
            slots[i] = table[count(p / kBlock)] * kBlock + p % kBlock;
        }
        starts[1] = end - begin;
        lengths[0] = end;
    }
    static size_t count(int n) { return static_cast<size_t>(n); }
    BatchView view() const {
        return {ids.get(), positions.get(), slots.get(), starts.get(), lengths.get(), table.get(), rows.get(), static_cast<int>(ids.size()), 1, static_cast<int>(table.size()), static_cast<int>(rows.size())};
    }
};

std::vector<int> text(int n) {
    Random random(11);
    std::vector<int> ids;
    for (int i = 0; i < n; ++i) ids.push_back(random.below(kVocab));
    return ids;
}

int screened_steps = 0;

// Logits of the text fed in pieces, as bits; and the largest three of each row are those of the full logits.
Exact<float> feed(Model& model, const std::vector<int>& ids, const std::vector<int>& ends) {
    Exact<float> all(ids.size() * kVocab);
    int begin = 0, screened = 0;
    for (const int end : ends) {
        const Step step(ids, begin, end);
        model.plan.begin(step.view(), 3);
        model.plan.run(0, model.top + 1, false);
        screened += model.plan.head_rows_finished() > 0;
        const std::vector<int32_t> top = model.plan.top_ids();
        model.plan.begin(step.view(), 0);
        model.plan.run(0, model.phases, end % 2 == 1);
        std::memcpy(all.get() + static_cast<size_t>(begin) * kVocab, model.plan.buffer(model.logits), sizeof(float) * static_cast<size_t>(end - begin) * kVocab);
        for (int t = begin; t < end; ++t) {
            const float* row = all.get() + static_cast<size_t>(t) * kVocab;
            int best = 0;
            for (int i = 1; i < kVocab; ++i) best = row[i] > row[best] ? i : best;
            check(top.size() == 3 * static_cast<size_t>(end - begin) && top[3 * static_cast<size_t>(t - begin)] == best, "the largest logit");
        }
        begin = end;
    }
    screened_steps += screened;
    bool finite = true;
    for (size_t i = 0; i < all.size(); ++i) finite &= std::isfinite(all[i]);
    check(finite, "logits are finite");
    return all;
}

template <class Change> void refused(Model& model, const char* what, Change change) {
    const std::vector<int> ids = text(40);
    Step step(ids, 0, 40);
    BatchView view = step.view();
    change(step, view);
    bool thrown = false;
    try {
        model.plan.begin(view, 0);
    } catch (const std::invalid_argument&) {
        thrown = true;
    }
    check(thrown, std::string("refused: ") + what);
}

void bad_batches(Model& model) {
    refused(model, "no tokens", [](Step&, BatchView& v) { v.num_tokens = 0; });
    refused(model, "starts past the tokens", [](Step& s, BatchView&) { s.starts[1] = 41; });
    refused(model, "a token id past the vocabulary", [](Step& s, BatchView&) { s.ids[39] = kVocab; });
    refused(model, "a negative token id", [](Step& s, BatchView&) { s.ids[0] = -1; });
    refused(model, "a block past the cache", [](Step& s, BatchView&) { s.table[1] = kBlocks; });
    refused(model, "a negative block", [](Step& s, BatchView&) { s.table[2] = -1; });
    refused(model, "a position that jumps", [](Step& s, BatchView&) { s.positions[7] = 9; });
    refused(model, "another slot", [](Step& s, BatchView&) { ++s.slots[5]; });
    refused(model, "a context past the tables", [](Step& s, BatchView&) { s.lengths[0] = kContext + 1; });
    refused(model, "a context shorter than its tokens", [](Step& s, BatchView&) { s.lengths[0] = 39; });
    refused(model, "a negative context", [](Step& s, BatchView&) { s.lengths[0] = -5; });
    refused(model, "a block table too short", [](Step&, BatchView& v) { v.max_blocks = 2; });
    refused(model, "an output row past the tokens", [](Step& s, BatchView&) { s.rows[3] = 40; });
    refused(model, "a negative output row", [](Step& s, BatchView&) { s.rows[3] = -1; });
    Exact<int32_t> starts(3), lengths(2), tables(26);
    starts[1] = 200, starts[2] = 40;  // rises past the tokens, then falls back
    lengths[0] = 200, lengths[1] = 40;
    const Step good(text(40), 0, 40);
    for (size_t i = 0; i < good.table.size(); ++i) tables[i] = good.table[i];
    refused(model, "starts that fall", [&](Step&, BatchView& v) { v.query_starts = starts.get(), v.context_lengths = lengths.get(), v.block_tables = tables.get(), v.num_seqs = 2, v.max_blocks = 13; });
}

}  // namespace

void plan() {
    const std::vector<int> ids = text(kContext - 60);  // past a span of 256 keys
    const int n = static_cast<int>(ids.size());
    std::vector<int> single;
    for (int i = n - 20; i <= n; ++i) single.push_back(i);
    for (const Kernels* k : every_isa())
        for (const KvType kv : {KvType::F16, KvType::F32, KvType::Q8})
            for (const bool int8 : {true, false}) {
                const std::string here = say({{"kv", static_cast<long>(kv)}, {"int8", int8}}, std::string("plan on ") + k->name);
                Model first(k, 1, int8, kv, true);
                const Exact<float> whole = feed(first, ids, {n});
                check(feed(first, ids, {1, 2, 7, 40, 250, 256, 257, n}).same_bits(whole), here + ": in pieces");
                Model plain(k, 2, int8, kv, false);
                check(feed(plain, ids, {n}).same_bits(whole), here + ": unfused, two threads");
                Model five(k, 5, int8, kv, true);
                check(feed(five, ids, single).same_bits(whole), here + ": token by token at the end, five threads");
                if (kv == KvType::F16 && int8) bad_batches(first);
            }
    check(screened_steps > 0, "some steps screen the output head");
}

}  // namespace test
