// Storing keys and values, and attending over them: the rows that share a key meet it together, converted once.
// Part of kernels.inl.

inline int8_t code8(float x, float scale) {
    const float scaled = scale > 0.0f ? x / scale : 0.0f;
    return static_cast<int8_t>(std::nearbyint(scaled >= 127.0f ? 127.0f : scaled > -127.0f ? scaled : -127.0f));
}

// One vector of head_dim values, `stride` elements apart in the cache (block_size for keys, 1 for values).
inline void store_vector(KvType type, void* base, uint16_t* scales, size_t at, size_t stride, size_t scale_at, size_t scale_stride, const float* x, int head_dim) {
    if (type == KvType::F32) {
        float* p = static_cast<float*>(base) + at;
        for (int d = 0; d < head_dim; ++d) p[d * stride] = x[d];
    } else if (type == KvType::F16) {
        uint16_t* p = static_cast<uint16_t*>(base) + at;
        for (int d = 0; d < head_dim; ++d) p[d * stride] = float_to_half(x[d]);
    } else {
        int8_t* p = static_cast<int8_t*>(base) + at;
        for (int g = 0; g < head_dim / 32; ++g) {
            float amax = 0.0f, nothing = 0.0f;  // nothing: as in quantize
            for (int d = 0; d < 32; ++d) {
                amax = std::fabs(x[32 * g + d]) > amax ? std::fabs(x[32 * g + d]) : amax;
                nothing += x[32 * g + d] * 0.0f;
            }
            const uint16_t scale = float_to_half((amax + nothing) / 127.0f);
            const float rounded = half_to_float(scale);
            scales[scale_at + g * scale_stride] = scale;
            for (int d = 0; d < 32; ++d) p[(32 * g + d) * stride] = code8(x[32 * g + d], rounded);
        }
    }
}

void store_kv(const KvLayer& kv, int slot, int kv_head, const float* k, const float* v) {
    const size_t block = slot / kv.block_size, offset = slot % kv.block_size;
    const size_t head = block * kv.num_kv_heads + kv_head;
    const size_t size = head * kv.head_dim * kv.block_size, groups = kv.head_dim / 32;
    store_vector(kv.k_type, kv.k, kv.k_scale, size + offset, kv.block_size, head * groups * kv.block_size + offset, kv.block_size, k, kv.head_dim);
    store_vector(kv.v_type, kv.v, kv.v_scale, size + offset * kv.head_dim, 1, (head * kv.block_size + offset) * groups, 1, v, kv.head_dim);
}

template <KvType TYPE> inline F8 load_kv(const void* base, size_t at) {
    if constexpr (TYPE == KvType::F32) return f_load(static_cast<const float*>(base) + at);
    else if constexpr (TYPE == KvType::F16) return f_load_half(static_cast<const uint16_t*>(base) + at);
    else return f_from_i(i_load_s8(static_cast<const uint8_t*>(base) + at));
}

constexpr int kQueryStride = kMaxHeadDim + 16;  // the same dimension of several rows should not fall on one cache set

// Scores of 8 * NV keys that lie side by side in one block: lanes are keys, dimensions in rising order. q [G, kQueryStride].
template <KvType TYPE, int G, int NV>
inline void score_keys(const AttendArgs& a, const float* q, size_t at, size_t scale_at, const uint8_t* ahead, float* scores) {
    const KvLayer& kv = *a.kv;
    F8 acc[G][NV];
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < NV; ++n) acc[g][n] = f_zero();
    const int step = TYPE == KvType::Q8 ? 32 : kv.head_dim;
    for (int base = 0; base < kv.head_dim; base += step) {
        F8 part[G][NV];
        for (int g = 0; g < G; ++g)
            for (int n = 0; n < NV; ++n) part[g][n] = TYPE == KvType::Q8 ? f_zero() : acc[g][n];
        for (int d = base; d < base + step; ++d) {
            if (ahead) prefetch(ahead + static_cast<size_t>(d) * 64);
            F8 key[NV];
            for (int n = 0; n < NV; ++n) key[n] = load_kv<TYPE>(kv.k, at + static_cast<size_t>(d) * kv.block_size + 8 * n);
            for (int g = 0; g < G; ++g) {
                const F8 query = f_set1(q[g * kQueryStride + d]);
                for (int n = 0; n < NV; ++n) part[g][n] = f_fma(query, key[n], part[g][n]);
            }
        }
        for (int g = 0; g < G; ++g)
            for (int n = 0; n < NV; ++n)
                acc[g][n] = TYPE == KvType::Q8
                    ? f_fma(f_load_half(kv.k_scale + scale_at + static_cast<size_t>(base / 32) * kv.block_size + 8 * n), part[g][n], acc[g][n])
                    : part[g][n];
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < NV; ++n) f_store(scores + g * kSpan + 8 * n, f_mul(acc[g][n], f_set1(a.scale)));
}

template <KvType TYPE, int G, int NV>
inline void mix_values(const AttendArgs& a, const float* p, int dim, float* out) {  // dims [dim, dim + 8 NV)
    const KvLayer& kv = *a.kv;
    F8 acc[G][NV];
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < NV; ++n) acc[g][n] = f_zero();
    const int groups = kv.head_dim / 32;
    for (int key = a.key_begin; key < a.key_end;) {
        const size_t head = static_cast<size_t>(a.block_table[key / kv.block_size]) * kv.num_kv_heads + a.kv_head;
        const int end = (key / kv.block_size + 1) * kv.block_size < a.key_end ? (key / kv.block_size + 1) * kv.block_size : a.key_end;
        for (; key < end; ++key) {
            const size_t row = head * kv.block_size + key % kv.block_size;
            F8 value[NV];
            for (int n = 0; n < NV; ++n) value[n] = load_kv<TYPE>(kv.v, row * kv.head_dim + dim + 8 * n);
            if constexpr (TYPE == KvType::Q8) {
                const F8 scale = f_set1(half_to_float(kv.v_scale[row * groups + dim / 32]));
                for (int n = 0; n < NV; ++n) value[n] = f_mul(value[n], scale);
            }
            for (int g = 0; g < G; ++g) {
                const F8 weight = f_set1(p[g * kSpan + key - a.key_begin]);
                for (int n = 0; n < NV; ++n) acc[g][n] = f_fma(weight, value[n], acc[g][n]);
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < NV; ++n) f_store(out + g * kv.head_dim + dim + 8 * n, acc[g][n]);
}

// The values of this block, or the keys of the next, for the calls that score the block's keys to fetch on the way: a
// cache line with each dimension, which is all of a float16 block of 32.
template <KvType K, KvType V> inline const uint8_t* next_bytes(const AttendArgs& a, int key) {
    const KvLayer& kv = *a.kv;
    auto block = [&](const void* base, KvType type, int index) {
        const size_t width = type == KvType::F32 ? 4 : type == KvType::F16 ? 2 : 1;
        const size_t head = static_cast<size_t>(a.block_table[index]) * kv.num_kv_heads + a.kv_head;
        return static_cast<const uint8_t*>(base) + head * kv.head_dim * kv.block_size * width;
    };
    const int index = key / kv.block_size, offset = key % kv.block_size;
    if (offset == 0) return block(kv.v, V, index);
    if (offset <= 16 && (index + 1) * kv.block_size < a.key_end) return block(kv.k, K, index + 1);
    return nullptr;
}

template <KvType K, KvType V, int G> void attend_group(const AttendArgs& a, int first) {
    const KvLayer& kv = *a.kv;
    alignas(64) float q[kQueryStride * G];  // a stride the compiler knows
    for (int g = 0; g < G; ++g)
        std::memcpy(q + g * kQueryStride, a.q + (first + g) / a.group * a.q_stride + static_cast<size_t>((first + g) % a.group) * kv.head_dim, sizeof(float) * kv.head_dim);
    const int keys = a.key_end - a.key_begin;
    alignas(32) float scores[G * kSpan];
    constexpr int kWide = G <= 3 || kRegisters == 32 ? 2 : 1;
    for (int key = a.key_begin; key < a.key_end;) {
        const size_t head = static_cast<size_t>(a.block_table[key / kv.block_size]) * kv.num_kv_heads + a.kv_head;
        const int offset = key % kv.block_size;
        const size_t at = head * kv.head_dim * kv.block_size + offset;
        const size_t scale_at = head * (kv.head_dim / 32) * kv.block_size + offset;
        float* out = scores + key - a.key_begin;
        const uint8_t* ahead = a.ahead ? next_bytes<K, V>(a, key) : nullptr;
        if (kWide == 2 && key + 8 < a.key_end && offset + 16 <= kv.block_size) {
            score_keys<K, G, kWide>(a, q, at, scale_at, ahead, out);
            key += 16;
        } else {
            score_keys<K, G, 1>(a, q, at, scale_at, ahead, out);
            key += 8;
        }
    }
    const int padded = (keys + 7) / 8 * 8;
    for (int g = 0; g < G; ++g) {
        float* s = scores + g * kSpan;
        const float m = max_value(s, keys);
        for (int j = keys; j < padded; ++j) s[j] = m;  // the lanes past the last key held no key
        F8 sum = f_zero();
        for (int j = 0; j < padded; j += 8) {
            F8 p = f_exp(f_sub(f_load(s + j), f_set1(m)));
            f_store(s + j, p);
            if (j + 8 > keys) {
                for (int i = keys; i < padded; ++i) s[i] = 0.0f;
                p = f_load(s + j);
            }
            sum = f_add(sum, p);
        }
        float lane[8];
        f_store(lane, sum);
        a.m[first + g] = m;
        a.l[first + g] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
    float* out = a.acc + static_cast<size_t>(first) * kv.head_dim;
    int dim = 0;
    if constexpr (G <= 7 || kRegisters == 32)
        for (; dim + 16 <= kv.head_dim; dim += 16) mix_values<V, G, 2>(a, scores, dim, out);
    for (; dim < kv.head_dim; dim += 8) mix_values<V, G, 1>(a, scores, dim, out);
}

template <KvType K, KvType V> void attend_typed(const AttendArgs& a) {
    int first = 0;
    while (first < a.group * a.tokens) {
        const int left = a.group * a.tokens - first;
        if (left >= 14) attend_group<K, V, 14>(a, first), first += 14;
        else if (left >= 12) attend_group<K, V, 12>(a, first), first += 12;
        else if (left >= 7) attend_group<K, V, 7>(a, first), first += 7;
        else if (left >= 4) attend_group<K, V, 4>(a, first), first += 4;
        else if (left == 3) attend_group<K, V, 3>(a, first), first += 3;
        else if (left == 2) attend_group<K, V, 2>(a, first), first += 2;
        else attend_group<K, V, 1>(a, first), first += 1;
    }
}

template <KvType K> void attend_key(const AttendArgs& a) {
    if (a.kv->v_type == KvType::F16) attend_typed<K, KvType::F16>(a);
    else if (a.kv->v_type == KvType::F32) attend_typed<K, KvType::F32>(a);
    else attend_typed<K, KvType::Q8>(a);
}

void attend(const AttendArgs& a) {
    if (a.kv->k_type == KvType::F16) attend_key<KvType::F16>(a);
    else if (a.kv->k_type == KvType::F32) attend_key<KvType::F32>(a);
    else attend_key<KvType::Q8>(a);
}

void merge_spans(const float* m, const float* l, const float* acc, int num_spans, int stride_ml, int stride_acc, int head_dim, float* out) {
    float top = m[0];
    for (int s = 1; s < num_spans; ++s) top = m[s * stride_ml] > top ? m[s * stride_ml] : top;
    float total = 0.0f;
    for (int d = 0; d < head_dim; d += 8) f_store(out + d, f_zero());
    for (int s = 0; s < num_spans; ++s) {
        float lane[8];
        f_store(lane, f_exp(f_set1(m[s * stride_ml] - top)));
        const float weight = lane[0];
        total = total + weight * l[s * stride_ml];
        for (int d = 0; d < head_dim; d += 8) f_store(out + d, f_fma(f_set1(weight), f_load(acc + s * stride_acc + d), f_load(out + d)));
    }
    for (int d = 0; d < head_dim; d += 8) f_store(out + d, f_div(f_load(out + d), f_set1(total)));
}
