// All kernels, written once over the vector words of simd_*.h. Included by one translation unit an instruction set,
// inside that unit's own unnamed namespace, so no compiled function is shared between instruction sets.
// Read kernels.h first for formulas and shapes, panel.h for the layouts.

namespace {

using namespace cutaway;

// ---------------------------------------------------------------------------------------------------------------
// Unpacking codes
// ---------------------------------------------------------------------------------------------------------------

template <int J> inline B32 nibble(const B32* lo) {  // columns 4J..4J+3 of a group
    if constexpr (J < 4) return b_field<0, 0x0f>(lo[J]);
    else return b_field<-4, 0x0f>(lo[J - 4]);
}

template <int BITS> struct Codes {  // 4 bits: nibbles only
    static inline void unpack(const uint8_t* p, B32* u) {
        const B32 lo[4] = {b_load(p), b_load(p + 32), b_load(p + 64), b_load(p + 96)};
        u[0] = nibble<0>(lo); u[1] = nibble<1>(lo); u[2] = nibble<2>(lo); u[3] = nibble<3>(lo);
        u[4] = nibble<4>(lo); u[5] = nibble<5>(lo); u[6] = nibble<6>(lo); u[7] = nibble<7>(lo);
    }
};
template <> struct Codes<5> {  // bit 4 of column group J is bit J of its byte
    static inline void unpack(const uint8_t* p, B32* u) {
        const B32 hi = b_load(p);
        Codes<4>::unpack(p + 32, u);
        u[0] = b_or(u[0], b_field<4, 0x10>(hi)); u[1] = b_or(u[1], b_field<3, 0x10>(hi));
        u[2] = b_or(u[2], b_field<2, 0x10>(hi)); u[3] = b_or(u[3], b_field<1, 0x10>(hi));
        u[4] = b_or(u[4], b_field<0, 0x10>(hi)); u[5] = b_or(u[5], b_field<-1, 0x10>(hi));
        u[6] = b_or(u[6], b_field<-2, 0x10>(hi)); u[7] = b_or(u[7], b_field<-3, 0x10>(hi));
    }
};
template <> struct Codes<6> {  // bits 4-5 as two-bit fields
    static inline void unpack(const uint8_t* p, B32* u) {
        const B32 a = b_load(p), b = b_load(p + 32);
        Codes<4>::unpack(p + 64, u);
        u[0] = b_or(u[0], b_field<4, 0x30>(a)); u[1] = b_or(u[1], b_field<2, 0x30>(a));
        u[2] = b_or(u[2], b_field<0, 0x30>(a)); u[3] = b_or(u[3], b_field<-2, 0x30>(a));
        u[4] = b_or(u[4], b_field<4, 0x30>(b)); u[5] = b_or(u[5], b_field<2, 0x30>(b));
        u[6] = b_or(u[6], b_field<0, 0x30>(b)); u[7] = b_or(u[7], b_field<-2, 0x30>(b));
    }
};

inline void unpack_low3(const uint8_t* p, B32* u) {  // the second plane of S8: [two-bit fields 64 B] [bit 2, 32 B]
    const B32 a = b_load(p), b = b_load(p + 32), hi = b_load(p + 64);
    u[0] = b_or(b_field<0, 3>(a), b_field<2, 4>(hi)); u[1] = b_or(b_field<-2, 3>(a), b_field<1, 4>(hi));
    u[2] = b_or(b_field<-4, 3>(a), b_field<0, 4>(hi)); u[3] = b_or(b_field<-6, 3>(a), b_field<-1, 4>(hi));
    u[4] = b_or(b_field<0, 3>(b), b_field<-2, 4>(hi)); u[5] = b_or(b_field<-2, 3>(b), b_field<-3, 4>(hi));
    u[6] = b_or(b_field<-4, 3>(b), b_field<-4, 4>(hi)); u[7] = b_or(b_field<-6, 3>(b), b_field<-5, 4>(hi));
}

// ---------------------------------------------------------------------------------------------------------------
// Weight formats: where a group lies, its codes, its scales, and how it adds to a row's sum
// ---------------------------------------------------------------------------------------------------------------

// Scales of a group of eight rows; which fields are used is the format's matter.
struct Scales {
    F8 d;      // scale
    F8 m, m2;  // what one unit of activation adds (columns 0-31, or 0-15 and 16-31)
    I8 a, b;   // integer scales of columns 0-15 and 16-31
};

template <Kind KIND> struct Format;

template <int BITS_, int LOG> struct ScaleFormat {  // w = d * (u - 2^LOG)
    static constexpr int BITS = BITS_;
    static inline Scales scales(const uint8_t*, const uint8_t* group) { Scales s; s.d = f_load_half(reinterpret_cast<const uint16_t*>(group)); return s; }
    static inline void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static inline F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dot(acc, s, dot32<BITS>(u, y), g);
    }
    static inline F8 add_dot(F8 acc, const Scales& s, I8 dot, const GroupSums& g) {
        return f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(i_sub(dot, i_shl<LOG>(i_set1(g.sum)))), acc);
    }
    static inline F8 value(const Scales& s, I8 u, bool) { return f_mul(s.d, f_from_i(i_sub(u, i_set1(1 << LOG)))); }
};
template <> struct Format<Kind::S4> : ScaleFormat<4, 3> {};
template <> struct Format<Kind::S5> : ScaleFormat<5, 4> {};

template <int BITS_> struct MinFormat {  // w = d * u + m
    static constexpr int BITS = BITS_;
    static inline Scales scales(const uint8_t*, const uint8_t* group) {
        Scales s;
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(group));
        s.m = f_load_half(reinterpret_cast<const uint16_t*>(group + 16));
        return s;
    }
    static inline void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 32, u); }
    static inline F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dot(acc, s, dot32<BITS>(u, y), g);
    }
    static inline F8 add_dot(F8 acc, const Scales& s, I8 dot, const GroupSums& g) {
        return f_fma(s.m, f_set1(g.scaled_sum), f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(dot), acc));
    }
    static inline F8 value(const Scales& s, I8 u, bool) { return f_add(f_mul(s.d, f_from_i(u)), s.m); }
};
template <> struct Format<Kind::M4> : MinFormat<4> {};
template <> struct Format<Kind::M5> : MinFormat<5> {};

template <int BITS_> struct SuperMinFormat {  // w = (d * sc) * u - dmin * mn, groups of 32
    static constexpr int BITS = BITS_;
    static inline Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        s.d = f_mul(f_load_half(reinterpret_cast<const uint16_t*>(header)), f_from_i(i_load_u8(group)));
        s.m = f_sub(f_zero(), f_mul(f_load_half(reinterpret_cast<const uint16_t*>(header + 16)), f_from_i(i_load_u8(group + 8))));
        return s;
    }
    static inline void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static inline F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) { return MinFormat<BITS>::add(acc, s, u, y, g); }
    static inline F8 add_dot(F8 acc, const Scales& s, I8 dot, const GroupSums& g) { return MinFormat<BITS>::add_dot(acc, s, dot, g); }
    static inline F8 value(const Scales& s, I8 u, bool high) { return MinFormat<BITS>::value(s, u, high); }
};
template <> struct Format<Kind::K4> : SuperMinFormat<4> {};
template <> struct Format<Kind::K5> : SuperMinFormat<5> {};

template <int BITS_, int LOG> struct SuperScaleFormat {  // w = (d * sc) * (u - 2^LOG), groups of 16
    static constexpr int BITS = BITS_;
    static inline Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(header));
        s.a = i_load_s8(group);
        s.b = i_load_s8(group + 8);
        return s;
    }
    static inline void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static inline F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dots(acc, s, dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16), g);
    }
    static inline F8 add_dots(F8 acc, const Scales& s, I8 low, I8 high, const GroupSums& g) {
        const I8 sum = i_set1(g.sum), sum_low = i_set1(g.sum_low);
        low = i_sub(low, i_shl<LOG>(sum_low));
        high = i_sub(high, i_shl<LOG>(i_sub(sum, sum_low)));
        return f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(i_add(i_mul(low, s.a), i_mul(high, s.b))), acc);
    }
    static inline F8 value(const Scales& s, I8 u, bool high) { return f_mul(f_mul(s.d, f_from_i(high ? s.b : s.a)), f_from_i(i_sub(u, i_set1(1 << LOG)))); }
};
template <> struct Format<Kind::K6> : SuperScaleFormat<6, 5> {};
template <> struct Format<Kind::K3> : SuperScaleFormat<4, 2> {};

template <> struct Format<Kind::K2> {  // w = (d * sc) * u - dmin * mn, groups of 16
    static constexpr int BITS = 4;
    static inline Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        const F8 dmin = f_load_half(reinterpret_cast<const uint16_t*>(header + 16));
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(header));
        s.a = i_load_u8(group);
        s.b = i_load_u8(group + 8);
        s.m = f_sub(f_zero(), f_mul(dmin, f_from_i(i_load_u8(group + 16))));
        s.m2 = f_sub(f_zero(), f_mul(dmin, f_from_i(i_load_u8(group + 24))));
        return s;
    }
    static inline void codes(const uint8_t* group, B32* u) { Codes<4>::unpack(group + 32, u); }
    static inline F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dots(acc, s, dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16), g);
    }
    static inline F8 add_dots(F8 acc, const Scales& s, I8 low, I8 high, const GroupSums& g) {
        const I8 dot = i_add(i_mul(low, s.a), i_mul(high, s.b));
        acc = f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(dot), acc);
        acc = f_fma(s.m, f_set1(g.scale * static_cast<float>(g.sum_low)), acc);
        return f_fma(s.m2, f_set1(g.scale * static_cast<float>(g.sum - g.sum_low)), acc);
    }
    static inline F8 value(const Scales& s, I8 u, bool high) {
        return f_add(f_mul(f_mul(s.d, f_from_i(high ? s.b : s.a)), f_from_i(u)), high ? s.m2 : s.m);
    }
};

template <> struct Format<Kind::S8> : ScaleFormat<5, 4> {  // w = d * (8 h + l - 128); `low` is the plane of l
    static inline void join(const uint8_t* group, const uint8_t* low, B32* u) {  // u = 8 h + l
        B32 l[8];
        Codes<5>::unpack(group + 16, u);
        unpack_low3(low, l);
        for (int j = 0; j < 8; ++j) u[j] = b_or(b_field<3, 0xf8>(u[j]), l[j]);
    }
    static inline F8 add_split(F8 acc, const Scales& s, const B32* h, const B32* l, const int8_t* y, const GroupSums& g) {
        const I8 dot = i_sub(i_add(i_shl<3>(dot32<5>(h, y)), dot32<3>(l, y)), i_shl<7>(i_set1(g.sum)));
        return f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(dot), acc);
    }
    static inline F8 add_joined(F8 acc, const Scales& s, I8 dot, const GroupSums& g) {  // dot with codes from b_prepare8
        if constexpr (kOffset8 != 0) dot = i_sub(dot, i_shl<7>(i_set1(g.sum)));
        return f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(dot), acc);
    }
};

template <Kind KIND> struct Walk {  // header and group pointers of a panel
    const uint8_t* panel;
    static constexpr bool SUPER = KIND == Kind::K2 || KIND == Kind::K3 || KIND == Kind::K4 || KIND == Kind::K5 || KIND == Kind::K6;
    static constexpr int GROUP = KIND == Kind::S4 ? 144 : KIND == Kind::S5 || KIND == Kind::S8 ? 176 : KIND == Kind::M4 ? 160
        : KIND == Kind::M5 ? 192 : KIND == Kind::K2 ? 160 : KIND == Kind::K3 || KIND == Kind::K4 ? 144 : KIND == Kind::K5 ? 176 : 208;
    static constexpr int HEADER = KIND == Kind::K2 || KIND == Kind::K4 || KIND == Kind::K5 ? 32 : 16;
    inline const uint8_t* header(int g) const { return SUPER ? panel + static_cast<size_t>(g / 8) * (HEADER + 8 * GROUP) : panel; }
    inline const uint8_t* group(int g) const {
        return SUPER ? header(g) + HEADER + (g % 8) * GROUP : panel + static_cast<size_t>(g) * GROUP;
    }
};

template <int BYTES> inline void fetch(const uint8_t* p) {
    if constexpr (kAhead > 0)
        for (int i = 0; i < BYTES; i += 64) prefetch(p + kAhead + i);
}

// ---------------------------------------------------------------------------------------------------------------
// Matrix products
// ---------------------------------------------------------------------------------------------------------------

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

// Several tokens: the groups of two panels are unpacked once into a strip in the first-level cache, then met by every
// token, a few tokens at a time.
constexpr int kStripGroups = 28;

struct Strip {
    alignas(64) uint8_t codes[kStripGroups][256];
    alignas(64) float d[kStripGroups][8], m[kStripGroups][8], m2[kStripGroups][8];
    alignas(64) int32_t a[kStripGroups][8], b[kStripGroups][8];
};

template <Kind KIND> constexpr bool kHalves = KIND == Kind::K6 || KIND == Kind::K3 || KIND == Kind::K2;  // two integer scales a group
template <Kind KIND> constexpr bool kMin = KIND == Kind::M4 || KIND == Kind::M5 || KIND == Kind::K4 || KIND == Kind::K5 || KIND == Kind::K2;

template <Kind KIND> inline void fill(Strip& strip, const MatmulArgs& a, int panel, int begin, int end) {
    const Walk<KIND> walk{a.w->data + panel * a.w->panel_bytes()};
    for (int g = begin; g < end; ++g) {
        const uint8_t* group = walk.group(g);
        const int at = g - begin;
        fetch<Walk<KIND>::GROUP>(group);
        B32 u[8];
        if constexpr (KIND == Kind::S8) {
            Format<KIND>::join(group, a.w->low + panel * a.w->low_panel_bytes() + static_cast<size_t>(g) * 96, u);
            for (int j = 0; j < 8; ++j) u[j] = b_prepare8(u[j]);
        } else {
            Format<KIND>::codes(group, u);
        }
        for (int j = 0; j < 8; ++j) b_store(strip.codes[at] + 32 * j, u[j]);
        const Scales s = Format<KIND>::scales(walk.header(g), group);
        f_store(strip.d[at], s.d);
        if constexpr (kMin<KIND>) f_store(strip.m[at], s.m);
        if constexpr (KIND == Kind::K2) f_store(strip.m2[at], s.m2);
        if constexpr (kHalves<KIND>) i_store(strip.a[at], s.a), i_store(strip.b[at], s.b);
    }
}

template <Kind KIND> inline Scales strip_scales(const Strip& strip, int at) {
    Scales s;
    s.d = f_load(strip.d[at]);
    if constexpr (kMin<KIND>) s.m = f_load(strip.m[at]);
    if constexpr (KIND == Kind::K2) s.m2 = f_load(strip.m2[at]);
    if constexpr (kHalves<KIND>) s.a = i_load(strip.a[at]), s.b = i_load(strip.b[at]);
    return s;
}

// P panels times T tokens over the groups [begin, end) of a strip; acc[p * kTokenBlock + t].
template <Kind KIND, int P, int T>
inline void tile(const Strip* strips, int begin, int end, const int8_t* codes, size_t codes_stride, const GroupSums* sums, size_t sums_stride, F8* acc) {
    constexpr int BITS = KIND == Kind::S8 ? 8 : Format<KIND>::BITS;
    F8 sum[P][T];
    for (int p = 0; p < P; ++p)
        for (int t = 0; t < T; ++t) sum[p][t] = acc[p * kTokenBlock + t];
    for (int g = begin; g < end; ++g) {
        const uint8_t* u[P];
        const int8_t* y[T];
        for (int p = 0; p < P; ++p) u[p] = strips[p].codes[g - begin];
        for (int t = 0; t < T; ++t) y[t] = codes + t * codes_stride + 32 * g;
        I8 low[P][T];
        if constexpr (kHalves<KIND>) {
            I8 high[P][T];
            const uint8_t* u_high[P];
            const int8_t* y_high[T];
            for (int p = 0; p < P; ++p) u_high[p] = u[p] + 128;
            for (int t = 0; t < T; ++t) y_high[t] = y[t] + 16;
            dot_tile<BITS, 16, P, T>(u, y, low);
            dot_tile<BITS, 16, P, T>(u_high, y_high, high);
            for (int p = 0; p < P; ++p) {
                const Scales s = strip_scales<KIND>(strips[p], g - begin);
                for (int t = 0; t < T; ++t) sum[p][t] = Format<KIND>::add_dots(sum[p][t], s, low[p][t], high[p][t], sums[t * sums_stride + g]);
            }
        } else {
            dot_tile<BITS, 32, P, T>(u, y, low);
            for (int p = 0; p < P; ++p) {
                const Scales s = strip_scales<KIND>(strips[p], g - begin);
                for (int t = 0; t < T; ++t) {
                    const GroupSums& group = sums[t * sums_stride + g];
                    if constexpr (KIND == Kind::S8) sum[p][t] = Format<KIND>::add_joined(sum[p][t], s, low[p][t], group);
                    else sum[p][t] = Format<KIND>::add_dot(sum[p][t], s, low[p][t], group);
                }
            }
        }
    }
    for (int p = 0; p < P; ++p)
        for (int t = 0; t < T; ++t) acc[p * kTokenBlock + t] = sum[p][t];
}

template <Kind KIND, int P>
void gemm_panels(const MatmulArgs& a, int panel, int first, int count, Strip* strips, F8* acc) {
    const int groups = a.w->groups();
    const size_t codes_stride = 32 * static_cast<size_t>(groups), sums_stride = groups;
    const int8_t* codes = a.codes + first * codes_stride;
    const GroupSums* sums = a.sums + first * sums_stride;
    for (int p = 0; p < P; ++p)
        for (int t = 0; t < count; ++t) acc[p * kTokenBlock + t] = f_zero();
    for (int begin = 0; begin < groups; begin += kStripGroups) {
        const int end = begin + kStripGroups < groups ? begin + kStripGroups : groups;
        for (int p = 0; p < P; ++p) fill<KIND>(strips[p], a, panel + p, begin, end);
        int t = 0;
        for (; t + kTileTokens <= count; t += kTileTokens) tile<KIND, P, kTileTokens>(strips, begin, end, codes + t * codes_stride, codes_stride, sums + t * sums_stride, sums_stride, acc + t);
        for (; t < count; ++t) tile<KIND, P, 1>(strips, begin, end, codes + t * codes_stride, codes_stride, sums + t * sums_stride, sums_stride, acc + t);
    }
    for (int p = 0; p < P; ++p)
        for (int t = 0; t < count; ++t) finish(a, panel + p, first + t, acc[p * kTokenBlock + t]);
}

// A handful of tokens: codes stay in registers, without the way through a strip.
template <Kind KIND, int T> void few(const MatmulArgs& a, int first) {
    const int groups = a.w->groups();
    const size_t panel_bytes = a.w->panel_bytes(), codes_stride = 32 * static_cast<size_t>(groups);
    const int8_t* codes = a.codes + first * codes_stride;
    const GroupSums* sums = a.sums + static_cast<size_t>(first) * groups;
    for (int p = a.panel_begin; p < a.panel_end; ++p) {
        const Walk<KIND> walk{a.w->data + p * panel_bytes};
        F8 acc[T];
        for (int t = 0; t < T; ++t) acc[t] = f_zero();
        for (int g = 0; g < groups; ++g) {
            const uint8_t* group = walk.group(g);
            fetch<Walk<KIND>::GROUP>(group);
            B32 u[8];
            const Scales s = Format<KIND>::scales(walk.header(g), group);
            if constexpr (KIND == Kind::S8) {
                Format<KIND>::join(group, a.w->low + p * a.w->low_panel_bytes() + static_cast<size_t>(g) * 96, u);
                for (int j = 0; j < 8; ++j) u[j] = b_prepare8(u[j]);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) acc[t] = Format<KIND>::add_joined(acc[t], s, dot32<8>(u, codes + t * codes_stride + 32 * g), sums[t * groups + g]);
            } else {
                Format<KIND>::codes(group, u);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) acc[t] = Format<KIND>::add(acc[t], s, u, codes + t * codes_stride + 32 * g, sums[t * groups + g]);
            }
        }
        for (int t = 0; t < T; ++t) finish(a, p, first + t, acc[t]);
    }
}

template <Kind KIND> void gemm(const MatmulArgs& a) {
    if (a.num_tokens <= 8) {
        int t = 0;
        for (; t + 8 <= a.num_tokens; t += 8) few<KIND, 8>(a, t);
        for (; t + 4 <= a.num_tokens; t += 4) few<KIND, 4>(a, t);
        for (; t < a.num_tokens; ++t) few<KIND, 1>(a, t);
        return;
    }
    Strip strips[2];
    F8 acc[2 * kTokenBlock];
    for (int first = 0; first < a.num_tokens; first += kTokenBlock) {
        const int count = a.num_tokens - first < kTokenBlock ? a.num_tokens - first : kTokenBlock;
        int p = a.panel_begin;
        for (; p + 2 <= a.panel_end; p += 2) gemm_panels<KIND, 2>(a, p, first, count, strips, acc);
        if (p < a.panel_end) gemm_panels<KIND, 1>(a, p, first, count, strips, acc);
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

// ---------------------------------------------------------------------------------------------------------------
// Rows: quantise, normalise, rotate, activate
// ---------------------------------------------------------------------------------------------------------------

void quantize(const float* x, int n, int8_t* codes, GroupSums* sums) {
    for (int g = 0; g < n / 32; ++g, x += 32, codes += 32) {
        const F8 v[4] = {f_load(x), f_load(x + 8), f_load(x + 16), f_load(x + 24)};
        float lane[8];
        f_store(lane, f_max(f_max(f_abs(v[0]), f_abs(v[1])), f_max(f_abs(v[2]), f_abs(v[3]))));
        float amax = lane[0];
        for (int i = 1; i < 8; ++i) amax = lane[i] > amax ? lane[i] : amax;
        const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
        int32_t whole[32];
        for (int i = 0; i < 4; ++i) i_store(whole + 8 * i, f_to_i(f_max(f_min(f_mul(v[i], f_set1(inverse)), f_set1(127.0f)), f_set1(-127.0f))));
        int32_t low = 0, high = 0;
        for (int i = 0; i < 16; ++i) low += whole[i], high += whole[16 + i];
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(whole[i]);
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
    x = f_min(f_max(x, f_set1(-87.33654f)), f_set1(88.37626f));
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

// ---------------------------------------------------------------------------------------------------------------
// KV cache and attention
// ---------------------------------------------------------------------------------------------------------------

inline int8_t code8(float x, float inverse) {
    const float scaled = x * inverse;
    return static_cast<int8_t>(std::nearbyint(scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled));
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
            float amax = 0.0f;
            for (int d = 0; d < 32; ++d) amax = std::fabs(x[32 * g + d]) > amax ? std::fabs(x[32 * g + d]) : amax;
            const uint16_t scale = float_to_half(amax / 127.0f);
            const float rounded = half_to_float(scale);
            const float inverse = rounded > 0.0f ? 1.0f / rounded : 0.0f;
            scales[scale_at + g * scale_stride] = scale;
            for (int d = 0; d < 32; ++d) p[(32 * g + d) * stride] = code8(x[32 * g + d], inverse);
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

// Scores of 8 * NV keys that lie side by side in one block: lanes are keys, dimensions in rising order. q [head_dim, G].
template <KvType TYPE, int G, int NV>
inline void score_keys(const AttendArgs& a, const float* q, size_t at, size_t scale_at, float* scores) {
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
            F8 key[NV];
            for (int n = 0; n < NV; ++n) key[n] = load_kv<TYPE>(kv.k, at + static_cast<size_t>(d) * kv.block_size + 8 * n);
            for (int g = 0; g < G; ++g) {
                const F8 query = f_set1(q[d * G + g]);
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

template <KvType K, KvType V, int G> void attend_group(const AttendArgs& a, int first) {
    const KvLayer& kv = *a.kv;
    alignas(32) float q[kMaxHeadDim * G];  // one dimension of all heads side by side
    for (int g = 0; g < G; ++g)
        for (int d = 0; d < kv.head_dim; ++d) q[d * G + g] = a.q[static_cast<size_t>(first + g) * kv.head_dim + d];
    const int keys = a.key_end - a.key_begin;
    alignas(32) float scores[G * kSpan];
    constexpr int kWide = G <= 3 || kRegisters == 32 ? 2 : 1;
    for (int key = a.key_begin; key < a.key_end;) {
        const size_t head = static_cast<size_t>(a.block_table[key / kv.block_size]) * kv.num_kv_heads + a.kv_head;
        const int offset = key % kv.block_size;
        const size_t at = head * kv.head_dim * kv.block_size + offset;
        const size_t scale_at = head * (kv.head_dim / 32) * kv.block_size + offset;
        float* out = scores + key - a.key_begin;
        if (kWide == 2 && key + 8 < a.key_end && offset + 16 <= kv.block_size) {
            score_keys<K, G, kWide>(a, q, at, scale_at, out);
            key += 16;
        } else {
            score_keys<K, G, 1>(a, q, at, scale_at, out);
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
    for (; dim + 16 <= kv.head_dim; dim += 16) mix_values<V, G, 2>(a, scores, dim, out);
    for (; dim < kv.head_dim; dim += 8) mix_values<V, G, 1>(a, scores, dim, out);
}

template <KvType K, KvType V> void attend_typed(const AttendArgs& a) {
    int first = 0;
    while (first < a.group) {
        const int left = a.group - first;
        if (left >= 7) attend_group<K, V, 7>(a, first), first += 7;
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

float read_stream(const uint8_t* p, size_t bytes, bool ahead) {
    B32 a = b_load(p), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 128) {
        if (ahead) prefetch(p + i + 2048), prefetch(p + i + 2048 + 64);
        a = b_or(a, b_load(p + i)), b = b_or(b, b_load(p + i + 32)), c = b_or(c, b_load(p + i + 64)), d = b_or(d, b_load(p + i + 96));
    }
    uint8_t out[32];
    b_store(out, b_or(b_or(a, b), b_or(c, d)));
    return static_cast<float>(out[0]);
}

const Kernels table = {CUTAWAY_ISA_NAME, matmul, matmul_high, unpack_panel, quantize, rms_norm, rope, silu_mul, add, store_kv, attend, merge_spans, max_value, read_stream};

}  // namespace
