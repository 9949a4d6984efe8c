// What is done to a row at a time: quantise, normalise, rotate, activate. Part of kernels.inl. Read next: attention.inl.

void quantize(const float* x, int n, int8_t* codes, GroupSums* sums) {
    for (int g = 0; g < n / 32; ++g, x += 32, codes += 32) {
        const F8 v[4] = {f_load(x), f_load(x + 8), f_load(x + 16), f_load(x + 24)};
        // nothing: 0, or NaN where a value is not finite, which a maximum may lose
        const F8 nothing = f_add(f_add(f_mul(v[0], f_zero()), f_mul(v[1], f_zero())), f_add(f_mul(v[2], f_zero()), f_mul(v[3], f_zero())));
        const float amax = f_largest(f_max(f_max(f_abs(v[0]), f_abs(v[1])), f_max(f_abs(v[2]), f_abs(v[3])))) + f_total(nothing);
        const float quotient = 127.0f / amax;
        const float inverse = quotient <= 3.4028235e38f ? quotient : 0.0f;  // not where it is infinite or NaN
        I8 code[4];
        for (int i = 0; i < 4; ++i) code[i] = f_to_i(f_max(f_min(f_mul(v[i], f_set1(inverse)), f_set1(127.0f)), f_set1(-127.0f)));
        i_store_s8(codes, code[0], code[1], code[2], code[3]);
        const int32_t low = i_total(i_add(code[0], code[1])), high = i_total(i_add(code[2], code[3]));
        const float scale = amax / 127.0f;
        sums[g] = {scale, scale * static_cast<float>(low + high), low + high, low};
    }
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    double sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; ++j) sum[j] += static_cast<double>(x[i + j]) * x[i + j];
    for (; i < n; ++i) sum[i % 8] += static_cast<double>(x[i]) * x[i];
    const double total = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    const float inverse = static_cast<float>(1.0 / std::sqrt(total / n + static_cast<double>(eps)));
    for (i = 0; i + 8 <= n; i += 8) f_store(out + i, f_mul(f_load(weight + i), f_mul(f_load(x + i), f_set1(inverse))));
    for (; i < n; ++i) out[i] = weight[i] * (x[i] * inverse);
}

void rope(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

// exp by 2^n * p(r), |r| <= ln 2 / 2: relative error below 2 units in the last place; below -87.3 it stays at 1e-38.
inline F8 f_exp(F8 x) {
    x = f_min(f_set1(88.37626f), f_max(f_set1(-87.33654f), x));  // in this order a NaN stays one
    const F8 n = f_round(f_mul(x, f_set1(1.44269504f)));
    F8 r = f_fma(n, f_set1(-0.693359375f), x);
    r = f_fma(n, f_set1(2.12194440e-4f), r);
    F8 p = f_set1(1.9875691500e-4f);
    p = f_fma(p, r, f_set1(1.3981999507e-3f));
    p = f_fma(p, r, f_set1(8.3334519073e-3f));
    p = f_fma(p, r, f_set1(4.1665795894e-2f));
    p = f_fma(p, r, f_set1(1.6666665459e-1f));
    p = f_fma(p, r, f_set1(5.0000001201e-1f));
    p = f_fma(f_mul(r, r), p, f_add(r, f_set1(1.0f)));
    return f_scale2(p, n);
}

inline F8 silu(F8 g, F8 u) {
    const F8 e = f_exp(f_sub(f_zero(), g));
    return f_mul(f_div(g, f_add(f_set1(1.0f), e)), u);
}

// Runs a whole-vector function over n values; the last n % 8 go through a padded vector, so every value sees the
// same operations wherever it stands.
template <class F> inline void each8(int n, const float* a, const float* b, float* out, F f) {
    int i = 0;
    for (; i + 8 <= n; i += 8) f_store(out + i, f(f_load(a + i), f_load(b + i)));
    if (i == n) return;
    float x[8] = {0}, y[8] = {0}, z[8];
    for (int j = 0; i + j < n; ++j) x[j] = a[i + j], y[j] = b[i + j];
    f_store(z, f(f_load(x), f_load(y)));
    for (int j = 0; i + j < n; ++j) out[i + j] = z[j];
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
    each8(n, gate, up, out, [](F8 g, F8 u) { return silu(g, u); });
}

void add(const float* a, const float* b, int n, float* out) {
    each8(n, a, b, out, [](F8 x, F8 y) { return f_add(x, y); });
}

float max_value(const float* x, int n) {
    float best = x[0];
    int i = 0;
    if (n >= 8) {
        F8 v = f_load(x);
        for (i = 8; i + 8 <= n; i += 8) v = f_max(v, f_load(x + i));
        float lane[8];
        f_store(lane, v);
        for (int j = 0; j < 8; ++j) best = lane[j] > best ? lane[j] : best;
    }
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
