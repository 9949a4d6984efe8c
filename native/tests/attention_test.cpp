// Storing keys and values, and attention over them; what was never stored is NaN.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace test {
namespace {

using namespace cutaway;

struct Cache {  // one layer, exactly sized, everything NaN (or, for int8 codes, with NaN scales)
    Exact<uint8_t> k, v;
    Exact<uint16_t> k_scale, v_scale;
    KvLayer layer;

    Cache(KvType k_type, KvType v_type, int blocks, int heads, int dim, int size)
        : k(bytes(k_type, blocks * heads * dim * size)), v(bytes(v_type, blocks * heads * dim * size)),
          k_scale(scales(k_type, blocks * heads * dim * size)), v_scale(scales(v_type, blocks * heads * dim * size)),
          layer{k.get(), v.get(), k_scale.size() ? k_scale.get() : nullptr, v_scale.size() ? v_scale.get() : nullptr, k_type, v_type, heads, dim, size} {
        std::memset(k.get(), 0xff, k.size());
        std::memset(v.get(), 0xff, v.size());
        if (k_scale.size()) std::memset(k_scale.get(), 0xff, 2 * k_scale.size());
        if (v_scale.size()) std::memset(v_scale.get(), 0xff, 2 * v_scale.size());
    }
    static size_t bytes(KvType t, int n) { return static_cast<size_t>(n) * (t == KvType::F32 ? 4 : t == KvType::F16 ? 2 : 1); }
    static size_t scales(KvType t, int n) { return t == KvType::Q8 ? static_cast<size_t>(n) / 32 : 0; }
};

double precision(KvType t) { return t == KvType::F32 ? 1e-6 : t == KvType::F16 ? 5e-4 : 6e-3; }

void one(const Kernels& k, KvType k_type, KvType v_type, int dim, int group, int size, int keys, Random& random, int tokens = 1) {
    const int heads = 2, head = 1, blocks = (keys + size - 1) / size + 1, spans = (keys + kSpan - 1) / kSpan;
    const size_t d = static_cast<size_t>(dim);
    Cache cache(k_type, v_type, blocks, heads, dim, size);
    Exact<int32_t> table(static_cast<size_t>(blocks - 1));  // in falling order; block 0 stays unused
    for (int i = 0; i + 1 < blocks; ++i) table[static_cast<size_t>(i)] = blocks - 1 - i;
    const Exact<float> keys_in(random.floats(static_cast<size_t>(keys) * d)), values_in(random.floats(static_cast<size_t>(keys) * d));
    for (int key = 0; key < keys; ++key)
        k.store_kv(cache.layer, table[static_cast<size_t>(key / size)] * size + key % size, head, keys_in.get() + key * dim, values_in.get() + key * dim);

    const int rows = tokens * group;
    const size_t stride = heads * static_cast<size_t>(group) * d;  // from a token's query heads to the next one's
    const Exact<float> q(random.floats((tokens - 1) * stride + static_cast<size_t>(group) * d));
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const size_t lanes = static_cast<size_t>(spans * rows);
    Exact<float> m(lanes), l(lanes), acc(lanes * d), out(static_cast<size_t>(rows) * d);
    for (int s = 0; s < spans; ++s)
        k.attend({&cache.layer, table.get(), head, group, tokens, q.get(), stride, scale, s * kSpan, std::min(keys, (s + 1) * kSpan), keys % 2 == 1, m.get() + s * rows, l.get() + s * rows, acc.get() + static_cast<size_t>(s * rows) * d});
    for (int r = 0; r < rows; ++r)
        k.merge_spans(m.get() + r, l.get() + r, acc.get() + static_cast<size_t>(r) * d, spans, rows, rows * dim, dim, out.get() + static_cast<size_t>(r) * d);

    const std::string here = say({{"head_dim", dim}, {"group", group}, {"tokens", tokens}, {"block_size", size}, {"keys", keys}, {"k", static_cast<long>(k_type)}, {"v", static_cast<long>(v_type)}}, k.name);
    const double allowed = 2 * std::sqrt(static_cast<double>(dim)) * precision(k_type) + 2 * precision(v_type) + 1e-5;
    for (int r = 0; r < rows; ++r) {
        const float* query = q.get() + r / group * stride + static_cast<size_t>(r % group) * d;
        std::vector<double> weights(static_cast<size_t>(keys)), expected(d, 0.0);
        double total = 0;
        for (int key = 0; key < keys; ++key) {
            double score = 0;
            for (int i = 0; i < dim; ++i) score += static_cast<double>(query[i]) * keys_in[static_cast<size_t>(key * dim + i)];
            total += weights[static_cast<size_t>(key)] = std::exp(score * scale);
        }
        for (int key = 0; key < keys; ++key)
            for (size_t i = 0; i < d; ++i) expected[i] += weights[static_cast<size_t>(key)] / total * values_in[static_cast<size_t>(key) * d + i];
        for (size_t i = 0; i < d; ++i) check(std::fabs(out[static_cast<size_t>(r) * d + i] - expected[i]) <= allowed, here);
    }
}

}  // namespace

void attention() {
    Random random(3);
    const KvType types[] = {KvType::F16, KvType::F32, KvType::Q8};
    for (const Kernels* k : every_isa()) {
        for (const KvType k_type : types)
            for (const KvType v_type : types)
                for (const int keys : {1, 7, 8, 9, 31, 32, 33, 64, 65, 255, 256, 257, 264, 521}) {
                    one(*k, k_type, v_type, 32, 3, 32, keys, random);
                    one(*k, k_type, v_type, 32, 7, 32, keys, random, 2);
                    one(*k, k_type, v_type, 32, 3, 32, keys, random, 4);
                }
        for (const int dim : {8, 16, 24, 32, 40, 64, 80, 96, 128})
            for (const KvType type : types) {
                if (type == KvType::Q8 && dim % 32) continue;
                for (int group = 1; group <= 9; ++group) one(*k, type, type, dim, group, 16, 41, random);
            }
        for (const int size : {8, 16, 24, 32, 64})
            for (const int keys : {1, 8, 17, 24, 257, 300}) one(*k, KvType::F16, KvType::F16, 16, 7, size, keys, random);
    }
}

}  // namespace test
