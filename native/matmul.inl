// Matrix products: one token (the weights stream by once), a few (codes stay in registers), many (two panels at a time are
// unpacked into the first-level cache), and float32 activations. A row adds up its groups in the same order in all of them.
// Part of kernels.inl. Read next: rows.inl.

inline void finish(const MatmulArgs& a, int panel, int token, F8 acc) {
    const int row = 8 * panel, rows = a.w->rows;
    const size_t at = static_cast<size_t>(token) * rows + row;
    if (row + 8 <= rows) {
        if (a.bias) acc = f_add(acc, f_load(a.bias + row));
        if (a.residual) acc = f_add(f_load(a.residual + at), acc);
        f_store(a.out + at, acc);
        return;
    }
    float lane[8];
    f_store(lane, acc);
    for (int r = 0; row + r < rows; ++r) {
        if (a.bias) lane[r] = lane[r] + a.bias[row + r];
        if (a.residual) lane[r] = a.residual[at + r] + lane[r];
        a.out[at + r] = lane[r];
    }
}

inline void finish_silu(const MatmulArgs& a, int panel, int token, F8 gate, F8 up) {
    const int row = 8 * panel, rows = a.w->rows;
    float* out = a.out + static_cast<size_t>(token) * rows + row;
    if (row + 8 <= rows) {
        if (a.bias) gate = f_add(gate, f_load(a.bias + row));
        if (a.up_bias) up = f_add(up, f_load(a.up_bias + row));
        f_store(out, silu(gate, up));
        return;
    }
    float g[8], u[8];
    f_store(g, gate);
    f_store(u, up);
    for (int r = 0; row + r < rows; ++r) {
        if (a.bias) g[r] = g[r] + a.bias[row + r];
        if (a.up_bias) u[r] = u[r] + a.up_bias[row + r];
    }
    f_store(g, silu(f_load(g), f_load(u)));
    for (int r = 0; row + r < rows; ++r) out[r] = g[r];
}

// One token: the weights stream through once.
template <Kind KIND> void gemv(const MatmulArgs& a) {
    const int groups = a.w->groups();
    const size_t panel_bytes = a.w->panel_bytes();
    for (int p = a.panel_begin; p < a.panel_end; ++p) {
        const Walk<KIND> walk{a.w->data + p * panel_bytes};
        F8 acc = f_zero();
        for (int g = 0; g < groups; ++g) {
            const uint8_t* group = walk.group(g);
            fetch<Walk<KIND>::GROUP>(group);
            B32 u[8];
            Format<KIND>::codes(group, u);
            acc = Format<KIND>::add(acc, Format<KIND>::scales(walk.header(g), group), u, a.codes + 32 * g, a.sums[g]);
        }
        finish(a, p, 0, acc);
    }
}

template <> void gemv<Kind::S8>(const MatmulArgs& a) {
    const int groups = a.w->groups();
    const size_t panel_bytes = a.w->panel_bytes(), low_bytes = a.w->low_panel_bytes();
    for (int p = a.panel_begin; p < a.panel_end; ++p) {
        const uint8_t* group = a.w->data + p * panel_bytes;
        const uint8_t* low = a.w->low + p * low_bytes;
        F8 acc = f_zero();
        for (int g = 0; g < groups; ++g, group += 176, low += 96) {
            fetch<176>(group);
            fetch<96>(low);
            B32 h[8], l[8];
            Format<Kind::S8>::codes(group, h);
            unpack_low3(low, l);
            acc = Format<Kind::S8>::add_split(acc, Format<Kind::S8>::scales(nullptr, group), h, l, a.codes + 32 * g, a.sums[g]);
        }
        finish(a, p, 0, acc);
    }
}

// Several tokens: the groups of two panels are unpacked once into a strip in the first-level cache, side by side, then
// met by every token, a few tokens at a time. The two are neighbours (a last one without a neighbour is its own), or the
// same panel of a gate and of its up matrix.
constexpr int kStripGroups = 28;

struct Strip {
    alignas(64) uint8_t codes[kStripGroups][512];  // four columns of both panels, 64 bytes, eight times
    alignas(64) float d[kStripGroups][16], m[kStripGroups][16], m2[kStripGroups][16];
    alignas(64) int32_t a[kStripGroups][16], b[kStripGroups][16];
};

template <Kind KIND> constexpr bool kHalves = KIND == Kind::K6 || KIND == Kind::K3 || KIND == Kind::K2;  // two integer scales a group
template <Kind KIND> constexpr bool kMin = KIND == Kind::M4 || KIND == Kind::M5 || KIND == Kind::K4 || KIND == Kind::K5 || KIND == Kind::K2;

template <Kind KIND> inline void fill(Strip& strip, const Matrix& w, int panel, int side, int begin, int end) {
    const Walk<KIND> walk{w.data + panel * w.panel_bytes()};
    for (int g = begin; g < end; ++g) {
        const uint8_t* group = walk.group(g);
        const int at = g - begin, lane = 8 * side;
        fetch<Walk<KIND>::GROUP>(group);
        B32 u[8];
        if constexpr (KIND == Kind::S8) {
            Format<KIND>::join(group, w.low + panel * w.low_panel_bytes() + static_cast<size_t>(g) * 96, u);
            for (int j = 0; j < 8; ++j) u[j] = b_prepare8(u[j]);
        } else {
            Format<KIND>::codes(group, u);
        }
        for (int j = 0; j < 8; ++j) b_store(strip.codes[at] + 64 * j + 32 * side, u[j]);
        const Scales s = Format<KIND>::scales(walk.header(g), group);
        f_store(strip.d[at] + lane, s.d);
        if constexpr (kMin<KIND>) f_store(strip.m[at] + lane, s.m);
        if constexpr (KIND == Kind::K2) f_store(strip.m2[at] + lane, s.m2);
        if constexpr (kHalves<KIND>) i_store(strip.a[at] + lane, s.a), i_store(strip.b[at] + lane, s.b);
    }
}

template <Kind KIND> CUTAWAY_INLINE ScalesOf<16> strip_scales(const Strip& strip, int at) {
    ScalesOf<16> s;
    s.d = f_load16(strip.d[at]);
    if constexpr (kMin<KIND>) s.m = f_load16(strip.m[at]);
    if constexpr (KIND == Kind::K2) s.m2 = f_load16(strip.m2[at]);
    if constexpr (kHalves<KIND>) s.a = i_load16(strip.a[at]), s.b = i_load16(strip.b[at]);
    return s;
}

// A strip's panels times T tokens over the groups [begin, end), onto acc[t].
template <Kind KIND, int T>
CUTAWAY_INLINE void tile(const Strip& strip, int begin, int end, const int8_t* codes, size_t codes_stride, const GroupSums* sums, size_t sums_stride, F16* acc) {
    constexpr int BITS = KIND == Kind::S8 ? 8 : Format<KIND>::BITS;
    F16 sum[T];
    for (int t = 0; t < T; ++t) sum[t] = acc[t];
    for (int g = begin; g < end; ++g) {
        const uint8_t* u = strip.codes[g - begin];
        const int8_t* y[T];
        for (int t = 0; t < T; ++t) y[t] = codes + t * codes_stride + 32 * g;
        const auto s = strip_scales<KIND>(strip, g - begin);
        I16 low[T];
        if constexpr (kHalves<KIND>) {
            I16 high[T];
            const int8_t* y_high[T];
            for (int t = 0; t < T; ++t) y_high[t] = y[t] + 16;
            dot_tile<BITS, 16, T>(u, y, low);
            dot_tile<BITS, 16, T>(u + 256, y_high, high);
            for (int t = 0; t < T; ++t) sum[t] = Format<KIND>::add_dots(sum[t], s, low[t], high[t], sums[t * sums_stride + g]);
        } else {
            dot_tile<BITS, 32, T>(u, y, low);
            for (int t = 0; t < T; ++t) {
                const GroupSums& group = sums[t * sums_stride + g];
                if constexpr (KIND == Kind::S8) sum[t] = Format<KIND>::add_joined(sum[t], s, low[t], group);
                else sum[t] = Format<KIND>::add_dot(sum[t], s, low[t], group);
            }
        }
    }
    for (int t = 0; t < T; ++t) acc[t] = sum[t];
}

// The weights of the next strip, fetched part by part while this one meets its tokens.
template <Kind KIND> struct Upcoming {
    const uint8_t* at[2];
    int lines = 0;
    inline Upcoming(const MatmulArgs& a, int panel, int end) {
        const int groups = a.w->groups(), first = end < groups ? panel : panel + (a.up ? 1 : 2), g = end < groups ? end : 0;
        if (first + 1 >= a.panel_end) return;
        lines = (groups - g < kStripGroups ? groups - g : kStripGroups) * Walk<KIND>::GROUP / 64;
        at[0] = Walk<KIND>{a.w->data + first * a.w->panel_bytes()}.group(g);
        at[1] = a.up ? Walk<KIND>{a.up->data + first * a.up->panel_bytes()}.group(g) : at[0] + a.w->panel_bytes();
    }
    inline void fetch_part(int t, int count) const {
        for (int i = lines * t / count, last = lines * (t + kTileTokens) / count; i < last; ++i) prefetch_far(at[0] + 64 * i), prefetch_far(at[1] + 64 * i);
    }
};

template <Kind KIND> void gemm_panels(const MatmulArgs& a, int panel, int first, int count, Strip& strip, F16* acc) {
    const int groups = a.w->groups();
    const bool two = !a.up && panel + 1 < a.panel_end;
    const size_t codes_stride = 32 * static_cast<size_t>(groups), sums_stride = groups;
    const int8_t* codes = a.codes + first * codes_stride;
    const GroupSums* sums = a.sums + first * sums_stride;
    for (int t = 0; t < count; ++t) acc[t] = f_all<16>(0.0f);
    for (int begin = 0; begin < groups; begin += kStripGroups) {
        const int end = begin + kStripGroups < groups ? begin + kStripGroups : groups;
        fill<KIND>(strip, *a.w, panel, 0, begin, end);
        fill<KIND>(strip, a.up ? *a.up : *a.w, two ? panel + 1 : panel, 1, begin, end);
        const Upcoming<KIND> next(a, panel, end);
        int t = 0;
        for (; t + kTileTokens <= count; t += kTileTokens) {
            next.fetch_part(t, count);
            tile<KIND, kTileTokens>(strip, begin, end, codes + t * codes_stride, codes_stride, sums + t * sums_stride, sums_stride, acc + t);
        }
        for (; t < count; ++t) tile<KIND, 1>(strip, begin, end, codes + t * codes_stride, codes_stride, sums + t * sums_stride, sums_stride, acc + t);
    }
    for (int t = 0; t < count; ++t) {
        if (a.up) finish_silu(a, panel, first + t, f_low(acc[t]), f_high(acc[t]));
        else finish(a, panel, first + t, f_low(acc[t]));
        if (two) finish(a, panel + 1, first + t, f_high(acc[t]));
    }
}

// A handful of tokens: codes stay in registers, without the way through a strip. The tokens' activations are laid side by
// side first, group by group, so that one pointer walks them all.
template <Kind KIND, int T> void few(const MatmulArgs& a, int first) {
    const int groups = a.w->groups();
    const size_t panel_bytes = a.w->panel_bytes(), codes_stride = 32 * static_cast<size_t>(groups);
    const size_t codes_bytes = codes_stride * T;
    int8_t* const codes = static_cast<int8_t*>(std::malloc(codes_bytes + sizeof(GroupSums) * groups * T));
    if (!codes) std::abort();  // in the middle of a step, on every thread: there is no way back
    // SAFETY: the sums start at a multiple of 32 bytes of a block that malloc aligned for any type.
    GroupSums* const sums = reinterpret_cast<GroupSums*>(codes + codes_bytes);
    for (int g = 0; g < groups; ++g)
        for (int t = 0; t < T; ++t) {
            std::memcpy(codes + (g * T + t) * 32, a.codes + (first + t) * codes_stride + 32 * g, 32);
            sums[g * T + t] = a.sums[static_cast<size_t>(first + t) * groups + g];
        }
    for (int p = a.panel_begin; p < a.panel_end; ++p) {
        const Walk<KIND> walk{a.w->data + p * panel_bytes};
        F8 acc[T];
        for (int t = 0; t < T; ++t) acc[t] = f_zero();
        for (int g = 0; g < groups; ++g) {
            const uint8_t* group = walk.group(g);
            const int8_t* y = codes + g * T * 32;
            const GroupSums* sum = sums + g * T;
            fetch<Walk<KIND>::GROUP>(group);
            B32 u[8];
            const Scales s = Format<KIND>::scales(walk.header(g), group);
            if constexpr (KIND == Kind::S8) {
                Format<KIND>::join(group, a.w->low + p * a.w->low_panel_bytes() + static_cast<size_t>(g) * 96, u);
                for (int j = 0; j < 8; ++j) u[j] = b_prepare8(u[j]);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) acc[t] = Format<KIND>::add_joined(acc[t], s, dot32<8>(u, y + 32 * t), sum[t]);
            } else {
                Format<KIND>::codes(group, u);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) acc[t] = Format<KIND>::add(acc[t], s, u, y + 32 * t, sum[t]);
            }
        }
        for (int t = 0; t < T; ++t) finish(a, p, first + t, acc[t]);
    }
    std::free(codes);
}

template <Kind KIND> void gemm(const MatmulArgs& a) {
    if (a.num_tokens <= kFewTokens) {
        int t = 0;
        for (; t + 8 <= a.num_tokens; t += 8) few<KIND, 8>(a, t);
        for (; t + 4 <= a.num_tokens; t += 4) few<KIND, 4>(a, t);
        for (; t < a.num_tokens; ++t) few<KIND, 1>(a, t);
        return;
    }
    Strip strip;
    F16 acc[kTokenBlock];
    for (int first = 0; first < a.num_tokens; first += kTokenBlock) {
        const int count = a.num_tokens - first < kTokenBlock ? a.num_tokens - first : kTokenBlock;
        for (int p = a.panel_begin; p < a.panel_end; p += a.up ? 1 : 2) gemm_panels<KIND>(a, p, first, count, strip, acc);
    }
}

// ---- float32 activations: any format, unpacked to float32 [columns of a group, 8 rows] ----

template <Kind KIND> inline void group_values(const Matrix& w, int panel, int g, float* out) {
    if constexpr (KIND == Kind::F32 || KIND == Kind::F16 || KIND == Kind::BF16) {
        const uint8_t* p = w.data + panel * w.panel_bytes();
        for (int k = 0; k < 32; ++k) {
            const size_t at = (static_cast<size_t>(g) * 32 + k) * 8;
            if constexpr (KIND == Kind::F32) f_store(out + 8 * k, f_load(reinterpret_cast<const float*>(p) + at));
            if constexpr (KIND == Kind::F16) f_store(out + 8 * k, f_load_half(reinterpret_cast<const uint16_t*>(p) + at));
            if constexpr (KIND == Kind::BF16) f_store(out + 8 * k, f_load_bf16(reinterpret_cast<const uint16_t*>(p) + at));
        }
    } else {
        const Walk<KIND> walk{w.data + panel * w.panel_bytes()};
        const uint8_t* group = walk.group(g);
        const Scales s = Format<KIND>::scales(walk.header(g), group);
        B32 u[8];
        alignas(32) uint8_t bytes[256];
        if constexpr (KIND == Kind::S8) Format<KIND>::join(group, w.low + panel * w.low_panel_bytes() + static_cast<size_t>(g) * 96, u);
        else Format<KIND>::codes(group, u);
        for (int j = 0; j < 8; ++j) b_store(bytes + 32 * j, u[j]);
        for (int k = 0; k < 32; ++k) {
            uint8_t column[8];
            for (int r = 0; r < 8; ++r) column[r] = bytes[32 * (k / 4) + 4 * r + k % 4];
            const I8 code = i_load_u8(column);
            if constexpr (KIND == Kind::S8) f_store(out + 8 * k, f_mul(s.d, f_from_i(i_sub(code, i_set1(128)))));
            else f_store(out + 8 * k, Format<KIND>::value(s, code, k >= 16));
        }
    }
}

template <int TOKENS> inline void float_tile(const float* values, const float* x, size_t stride, int columns, F8* acc) {
    F8 low[TOKENS], high[TOKENS];
    for (int t = 0; t < TOKENS; ++t) low[t] = high[t] = f_zero();
    const int first = columns < 16 ? columns : 16;
    for (int k = 0; k < first; ++k) {
        const F8 w = f_load(values + 8 * k);
        for (int t = 0; t < TOKENS; ++t) low[t] = f_fma(w, f_set1(x[t * stride + k]), low[t]);
    }
    for (int k = 16; k < columns; ++k) {
        const F8 w = f_load(values + 8 * k);
        for (int t = 0; t < TOKENS; ++t) high[t] = f_fma(w, f_set1(x[t * stride + k]), high[t]);
    }
    for (int t = 0; t < TOKENS; ++t) acc[t] = f_add(acc[t], f_add(low[t], high[t]));
}

template <Kind KIND> void float_gemm(const MatmulArgs& a) {
    const int groups = a.w->groups(), columns = a.w->columns;
    alignas(64) float values[256];
    F8 acc[kTokenBlock];
    for (int first = 0; first < a.num_tokens; first += kTokenBlock) {
        const int count = a.num_tokens - first < kTokenBlock ? a.num_tokens - first : kTokenBlock;
        for (int p = a.panel_begin; p < a.panel_end; ++p) {
            for (int t = 0; t < count; ++t) acc[t] = f_zero();
            for (int g = 0; g < groups; ++g) {
                group_values<KIND>(*a.w, p, g, values);
                const int width = columns - 32 * g < 32 ? columns - 32 * g : 32;
                const float* x = a.x + static_cast<size_t>(first) * columns + 32 * g;
                int t = 0;
                for (; t + 4 <= count; t += 4) float_tile<4>(values, x + static_cast<size_t>(t) * columns, columns, width, acc + t);
                for (; t < count; ++t) float_tile<1>(values, x + static_cast<size_t>(t) * columns, columns, width, acc + t);
            }
            for (int t = 0; t < count; ++t) finish(a, p, first + t, acc[t]);
        }
    }
}

#define CUTAWAY_KINDS(CASE) CASE(S4) CASE(S5) CASE(S8) CASE(M4) CASE(M5) CASE(K2) CASE(K3) CASE(K4) CASE(K5) CASE(K6)

void matmul(const MatmulArgs& a) {
    if (a.codes) {
        switch (a.w->kind) {
#define CASE(KIND) case Kind::KIND: return a.num_tokens == 1 ? gemv<Kind::KIND>(a) : gemm<Kind::KIND>(a);
            CUTAWAY_KINDS(CASE)
#undef CASE
            default: return;
        }
    }
    switch (a.w->kind) {
#define CASE(KIND) case Kind::KIND: return float_gemm<Kind::KIND>(a);
        CUTAWAY_KINDS(CASE) CASE(F32) CASE(F16) CASE(BF16)
#undef CASE
    }
}

void matmul_high(const Matrix& w, int panel_begin, int panel_end, const int8_t* codes, const GroupSums* sums, float* out) {
    const int groups = w.groups();
    const size_t panel_bytes = w.panel_bytes();
    for (int p = panel_begin; p < panel_end; ++p) {
        const uint8_t* group = w.data + p * panel_bytes;
        F8 acc = f_zero();
        for (int g = 0; g < groups; ++g, group += 176) {
            fetch<176>(group);
            B32 h[8];
            Codes<5>::unpack(group + 16, h);
            const F8 dot = f_from_i(i_sub(i_shl<4>(dot32<5>(h, codes + 32 * g)), i_set1(sums[g].sum * 249)));  // 2 (8 h - 124.5)
            acc = f_fma(f_mul(f_load_half(reinterpret_cast<const uint16_t*>(group)), f_set1(0.5f * sums[g].scale)), dot, acc);
        }
        f_store(out + 8 * p, acc);
    }
}

void measure_low(const Matrix& w, int panel, int begin, int end, float* norm, float* scale) {
    alignas(32) int8_t ones[32];
    std::memset(ones, 1, 32);
    F8 squares = f_zero(), scales = f_zero();
    for (int g = begin; g < end; ++g) {
        const F8 d = f_abs(f_load_half(reinterpret_cast<const uint16_t*>(w.data + panel * w.panel_bytes() + static_cast<size_t>(g) * 176)));
        B32 l[8];
        unpack_low3(w.low + panel * w.low_panel_bytes() + static_cast<size_t>(g) * 96, l);
        I8 square = b_squares(l[0]);
        for (int j = 1; j < 8; ++j) square = i_add(square, b_squares(l[j]));
        // sum of (2 l - 7)^2 = 4 sum l^2 - 28 sum l + 32 * 49
        const I8 sum = i_add(i_sub(i_shl<2>(square), i_mul(dot32<3>(l, ones), i_set1(28))), i_set1(1568));
        squares = f_add(squares, f_mul(f_mul(f_mul(d, d), f_set1(0.25f)), f_from_i(sum)));
        scales = f_add(scales, d);
    }
    float lane[8];
    f_store(lane, squares);
    for (int r = 0; r < 8; ++r) norm[r] = std::sqrt(lane[r]);
    f_store(scale, scales);
}

void unpack_panel(const Matrix& w, int panel, float* out) {
    for (int g = 0; g < w.groups(); ++g) {
        float values[256];
        switch (w.kind) {
#define CASE(KIND) case Kind::KIND: group_values<Kind::KIND>(w, panel, g, values); break;
            CUTAWAY_KINDS(CASE) CASE(F32) CASE(F16) CASE(BF16)
#undef CASE
        }
        const int width = w.columns - 32 * g < 32 ? w.columns - 32 * g : 32;
        std::memcpy(out + 256 * static_cast<size_t>(g), values, sizeof(float) * 8 * width);
    }
}
