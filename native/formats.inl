// The weight formats as the kernels see them: where a group of a panel lies, its codes, its scales, and what it adds to the
// sums of eight rows. Part of kernels.inl; the layouts are drawn in panel.h. Read next: matmul.inl.

template <int J> CUTAWAY_INLINE B32 nibble(const B32* lo) {  // columns 4J..4J+3 of a group
    if constexpr (J < 4) return b_field<0, 0x0f>(lo[J]);
    else return b_field<-4, 0x0f>(lo[J - 4]);
}

template <int BITS> struct Codes {  // 4 bits: nibbles only
    static CUTAWAY_INLINE void unpack(const uint8_t* p, B32* u) {
        const B32 lo[4] = {b_load(p), b_load(p + 32), b_load(p + 64), b_load(p + 96)};
        u[0] = nibble<0>(lo); u[1] = nibble<1>(lo); u[2] = nibble<2>(lo); u[3] = nibble<3>(lo);
        u[4] = nibble<4>(lo); u[5] = nibble<5>(lo); u[6] = nibble<6>(lo); u[7] = nibble<7>(lo);
    }
};
template <> struct Codes<5> {  // bit 4 of column group J is bit J of its byte
    static CUTAWAY_INLINE void unpack(const uint8_t* p, B32* u) {
        const B32 hi = b_load(p);
        Codes<4>::unpack(p + 32, u);
        u[0] = b_or(u[0], b_field<4, 0x10>(hi)); u[1] = b_or(u[1], b_field<3, 0x10>(hi));
        u[2] = b_or(u[2], b_field<2, 0x10>(hi)); u[3] = b_or(u[3], b_field<1, 0x10>(hi));
        u[4] = b_or(u[4], b_field<0, 0x10>(hi)); u[5] = b_or(u[5], b_field<-1, 0x10>(hi));
        u[6] = b_or(u[6], b_field<-2, 0x10>(hi)); u[7] = b_or(u[7], b_field<-3, 0x10>(hi));
    }
};
template <> struct Codes<6> {  // bits 4-5 as two-bit fields
    static CUTAWAY_INLINE void unpack(const uint8_t* p, B32* u) {
        const B32 a = b_load(p), b = b_load(p + 32);
        Codes<4>::unpack(p + 64, u);
        u[0] = b_or(u[0], b_field<4, 0x30>(a)); u[1] = b_or(u[1], b_field<2, 0x30>(a));
        u[2] = b_or(u[2], b_field<0, 0x30>(a)); u[3] = b_or(u[3], b_field<-2, 0x30>(a));
        u[4] = b_or(u[4], b_field<4, 0x30>(b)); u[5] = b_or(u[5], b_field<2, 0x30>(b));
        u[6] = b_or(u[6], b_field<0, 0x30>(b)); u[7] = b_or(u[7], b_field<-2, 0x30>(b));
    }
};

CUTAWAY_INLINE void unpack_low3(const uint8_t* p, B32* u) {  // the second plane of S8: [two-bit fields 64 B] [bit 2, 32 B]
    const B32 a = b_load(p), b = b_load(p + 32), hi = b_load(p + 64);
    u[0] = b_or(b_field<0, 3>(a), b_field<2, 4>(hi)); u[1] = b_or(b_field<-2, 3>(a), b_field<1, 4>(hi));
    u[2] = b_or(b_field<-4, 3>(a), b_field<0, 4>(hi)); u[3] = b_or(b_field<-6, 3>(a), b_field<-1, 4>(hi));
    u[4] = b_or(b_field<0, 3>(b), b_field<-2, 4>(hi)); u[5] = b_or(b_field<-2, 3>(b), b_field<-3, 4>(hi));
    u[6] = b_or(b_field<-4, 3>(b), b_field<-4, 4>(hi)); u[7] = b_or(b_field<-6, 3>(b), b_field<-5, 4>(hi));
}

// ---------------------------------------------------------------------------------------------------------------
// Weight formats: where a group lies, its codes, its scales, and how it adds to a row's sum
// ---------------------------------------------------------------------------------------------------------------

// Scales of a group, of eight rows or of the sixteen of two panels; which fields are used is the format's matter.
template <int LANES> struct ScalesOf {
    FloatsOf<LANES> d;      // scale
    FloatsOf<LANES> m, m2;  // what one unit of activation adds (columns 0-31, or 0-15 and 16-31)
    IntsOf<LANES> a, b;     // integer scales of columns 0-15 and 16-31
};
using Scales = ScalesOf<8>;

template <Kind KIND> struct Format;

template <int BITS_, int LOG> struct ScaleFormat {  // w = d * (u - 2^LOG)
    static constexpr int BITS = BITS_;
    static CUTAWAY_INLINE Scales scales(const uint8_t*, const uint8_t* group) { Scales s; s.d = f_load_half(reinterpret_cast<const uint16_t*>(group)); return s; }
    static CUTAWAY_INLINE void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static CUTAWAY_INLINE F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dot(acc, s, dot32<BITS>(u, y), g);
    }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_dot(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> dot, const GroupSums& g) {
        return f_fma(f_mul(s.d, f_all<L>(g.scale)), f_from_i(i_sub(dot, i_shl<LOG>(i_all<L>(g.sum)))), acc);
    }
    static CUTAWAY_INLINE F8 value(const Scales& s, I8 u, bool) { return f_mul(s.d, f_from_i(i_sub(u, i_set1(1 << LOG)))); }
};
template <> struct Format<Kind::S4> : ScaleFormat<4, 3> {};
template <> struct Format<Kind::S5> : ScaleFormat<5, 4> {};

template <int BITS_> struct MinFormat {  // w = d * u + m
    static constexpr int BITS = BITS_;
    static CUTAWAY_INLINE Scales scales(const uint8_t*, const uint8_t* group) {
        Scales s;
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(group));
        s.m = f_load_half(reinterpret_cast<const uint16_t*>(group + 16));
        return s;
    }
    static CUTAWAY_INLINE void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 32, u); }
    static CUTAWAY_INLINE F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dot(acc, s, dot32<BITS>(u, y), g);
    }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_dot(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> dot, const GroupSums& g) {
        return f_fma(s.m, f_all<L>(g.scaled_sum), f_fma(f_mul(s.d, f_all<L>(g.scale)), f_from_i(dot), acc));
    }
    static CUTAWAY_INLINE F8 value(const Scales& s, I8 u, bool) { return f_add(f_mul(s.d, f_from_i(u)), s.m); }
};
template <> struct Format<Kind::M4> : MinFormat<4> {};
template <> struct Format<Kind::M5> : MinFormat<5> {};

template <int BITS_> struct SuperMinFormat {  // w = (d * sc) * u - dmin * mn, groups of 32
    static constexpr int BITS = BITS_;
    static CUTAWAY_INLINE Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        s.d = f_mul(f_load_half(reinterpret_cast<const uint16_t*>(header)), f_from_i(i_load_u8(group)));
        s.m = f_sub(f_zero(), f_mul(f_load_half(reinterpret_cast<const uint16_t*>(header + 16)), f_from_i(i_load_u8(group + 8))));
        return s;
    }
    static CUTAWAY_INLINE void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static CUTAWAY_INLINE F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) { return MinFormat<BITS>::add(acc, s, u, y, g); }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_dot(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> dot, const GroupSums& g) {
        return MinFormat<BITS>::add_dot(acc, s, dot, g);
    }
    static CUTAWAY_INLINE F8 value(const Scales& s, I8 u, bool high) { return MinFormat<BITS>::value(s, u, high); }
};
template <> struct Format<Kind::K4> : SuperMinFormat<4> {};
template <> struct Format<Kind::K5> : SuperMinFormat<5> {};

template <int BITS_, int LOG> struct SuperScaleFormat {  // w = (d * sc) * (u - 2^LOG), groups of 16
    static constexpr int BITS = BITS_;
    static CUTAWAY_INLINE Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(header));
        s.a = i_load_s8(group);
        s.b = i_load_s8(group + 8);
        return s;
    }
    static CUTAWAY_INLINE void codes(const uint8_t* group, B32* u) { Codes<BITS>::unpack(group + 16, u); }
    static CUTAWAY_INLINE F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dots(acc, s, dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16), g);
    }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_dots(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> low, IntsOf<L> high, const GroupSums& g) {
        const IntsOf<L> sum = i_all<L>(g.sum), sum_low = i_all<L>(g.sum_low);
        low = i_sub(low, i_shl<LOG>(sum_low));
        high = i_sub(high, i_shl<LOG>(i_sub(sum, sum_low)));
        return f_fma(f_mul(s.d, f_all<L>(g.scale)), f_from_i(i_add(i_mul(low, s.a), i_mul(high, s.b))), acc);
    }
    static CUTAWAY_INLINE F8 value(const Scales& s, I8 u, bool high) { return f_mul(f_mul(s.d, f_from_i(high ? s.b : s.a)), f_from_i(i_sub(u, i_set1(1 << LOG)))); }
};
template <> struct Format<Kind::K6> : SuperScaleFormat<6, 5> {};
template <> struct Format<Kind::K3> : SuperScaleFormat<4, 2> {};

template <> struct Format<Kind::K2> {  // w = (d * sc) * u - dmin * mn, groups of 16
    static constexpr int BITS = 4;
    static CUTAWAY_INLINE Scales scales(const uint8_t* header, const uint8_t* group) {
        Scales s;
        const F8 dmin = f_load_half(reinterpret_cast<const uint16_t*>(header + 16));
        s.d = f_load_half(reinterpret_cast<const uint16_t*>(header));
        s.a = i_load_u8(group);
        s.b = i_load_u8(group + 8);
        s.m = f_sub(f_zero(), f_mul(dmin, f_from_i(i_load_u8(group + 16))));
        s.m2 = f_sub(f_zero(), f_mul(dmin, f_from_i(i_load_u8(group + 24))));
        return s;
    }
    static CUTAWAY_INLINE void codes(const uint8_t* group, B32* u) { Codes<4>::unpack(group + 32, u); }
    static CUTAWAY_INLINE F8 add(F8 acc, const Scales& s, const B32* u, const int8_t* y, const GroupSums& g) {
        return add_dots(acc, s, dot16<BITS>(u, y), dot16<BITS>(u + 4, y + 16), g);
    }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_dots(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> low, IntsOf<L> high, const GroupSums& g) {
        const IntsOf<L> dot = i_add(i_mul(low, s.a), i_mul(high, s.b));
        acc = f_fma(f_mul(s.d, f_all<L>(g.scale)), f_from_i(dot), acc);
        acc = f_fma(s.m, f_all<L>(g.scale * static_cast<float>(g.sum_low)), acc);
        return f_fma(s.m2, f_all<L>(g.scale * static_cast<float>(g.sum - g.sum_low)), acc);
    }
    static CUTAWAY_INLINE F8 value(const Scales& s, I8 u, bool high) {
        return f_add(f_mul(f_mul(s.d, f_from_i(high ? s.b : s.a)), f_from_i(u)), high ? s.m2 : s.m);
    }
};

template <> struct Format<Kind::S8> : ScaleFormat<5, 4> {  // w = d * (8 h + l - 128); `low` is the plane of l
    static CUTAWAY_INLINE void join(const uint8_t* group, const uint8_t* low, B32* u) {  // u = 8 h + l
        B32 l[8];
        Codes<5>::unpack(group + 16, u);
        unpack_low3(low, l);
        for (int j = 0; j < 8; ++j) u[j] = b_or(b_field<3, 0xf8>(u[j]), l[j]);
    }
    static CUTAWAY_INLINE F8 add_split(F8 acc, const Scales& s, const B32* h, const B32* l, const int8_t* y, const GroupSums& g) {
        const I8 dot = i_sub(i_add(i_shl<3>(dot32<5>(h, y)), dot32<3>(l, y)), i_shl<7>(i_set1(g.sum)));
        return f_fma(f_mul(s.d, f_set1(g.scale)), f_from_i(dot), acc);
    }
    template <int L> static CUTAWAY_INLINE FloatsOf<L> add_joined(FloatsOf<L> acc, const ScalesOf<L>& s, IntsOf<L> dot, const GroupSums& g) {  // codes from b_prepare8
        if constexpr (kOffset8 != 0) dot = i_sub(dot, i_shl<7>(i_all<L>(g.sum)));
        return f_fma(f_mul(s.d, f_all<L>(g.scale)), f_from_i(dot), acc);
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
