#include "pack.h"

#include <algorithm>
#include <cstring>

namespace cutaway {
namespace {

struct FileFormat { const char* name; Kind kind; int group, bytes; };
constexpr FileFormat kFormats[] = {
    {"Q4_0", Kind::S4, 32, 18}, {"Q5_0", Kind::S5, 32, 22}, {"Q8_0", Kind::S8, 32, 34}, {"Q4_1", Kind::M4, 32, 20},
    {"Q5_1", Kind::M5, 32, 24}, {"Q2_K", Kind::K2, 256, 84}, {"Q3_K", Kind::K3, 256, 110}, {"Q4_K", Kind::K4, 256, 144},
    {"Q5_K", Kind::K5, 256, 176}, {"Q6_K", Kind::K6, 256, 210}, {"F32", Kind::F32, 1, 4}, {"F16", Kind::F16, 1, 2}, {"BF16", Kind::BF16, 1, 2},
};

const FileFormat* find(const std::string& name) {
    for (const FileFormat& f : kFormats)
        if (name == f.name) return &f;
    return nullptr;
}

inline uint32_t load32(const uint8_t* p) { uint32_t x; std::memcpy(&x, p, 4); return x; }
inline void store32(uint8_t* p, uint32_t x) { std::memcpy(p, &x, 4); }
inline void copy_half(uint8_t* p, const uint8_t* from) { std::memcpy(p, from, 2); }

// Four bits spread over the low bits of four bytes: bit i -> byte i.
inline uint32_t spread(uint32_t four_bits) { return ((four_bits & 15u) * 0x00204081u) & 0x01010101u; }

// Words of codes: word j holds columns 4j..4j+3 of a group of 32, one code a byte.
inline void put_nibbles(uint8_t* lo, int lane, const uint32_t* codes) {
    for (int v = 0; v < 4; ++v) store32(lo + 32 * v + 4 * lane, (codes[v] & 0x0f0f0f0fu) | ((codes[v + 4] & 0x0f0f0f0fu) << 4));
}
inline void put_bit(uint8_t* plane, int lane, const uint32_t* codes, int bit) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) word |= ((codes[j] >> bit) & 0x01010101u) << j;
    store32(plane + 4 * lane, word);
}
inline void put_pairs(uint8_t* plane, int lane, const uint32_t* codes, int bit) {
    for (int v = 0; v < 2; ++v) {
        uint32_t word = 0;
        for (int f = 0; f < 4; ++f) word |= ((codes[4 * v + f] >> bit) & 0x03030303u) << (2 * f);
        store32(plane + 32 * v + 4 * lane, word);
    }
}

// The codes of a 256-value group, group `g` of 32, from nibbles laid out 64 values to 32 bytes.
inline void super_nibbles(const uint8_t* qs, int g, uint32_t* codes) {
    const uint8_t* p = qs + 32 * (g / 2);
    for (int j = 0; j < 8; ++j) codes[j] = (load32(p + 4 * j) >> (4 * (g % 2))) & 0x0f0f0f0fu;
}
// Scale and min of group `g` of Q4_K and Q5_K: six bits each, packed into twelve bytes.
inline void super_scale(const uint8_t* s, int g, uint8_t* scale, uint8_t* min) {
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = static_cast<uint8_t>((s[g + 4] & 15) | ((s[g - 4] >> 6) << 4));
        *min = static_cast<uint8_t>((s[g + 4] >> 4) | ((s[g] >> 6) << 4));
    }
}

void pack_simple(Kind kind, const uint8_t* raw, int lane, uint8_t* group, uint8_t* low) {
    copy_half(group + 2 * lane, raw);
    uint32_t codes[8];
    if (kind == Kind::S8) {
        for (int j = 0; j < 8; ++j) codes[j] = load32(raw + 2 + 4 * j) ^ 0x80808080u;  // weight + 128
        put_pairs(low, lane, codes, 0);
        put_bit(low + 64, lane, codes, 2);
        for (uint32_t& word : codes) word = (word >> 3) & 0x1f1f1f1fu;
        put_bit(group + 16, lane, codes, 4);
        put_nibbles(group + 48, lane, codes);
        return;
    }
    const bool min = kind == Kind::M4 || kind == Kind::M5, five = kind == Kind::S5 || kind == Kind::M5;
    const uint8_t* p = raw + 2;
    uint8_t* out = group + 16;
    if (min) {
        copy_half(out + 2 * lane, p);
        p += 2, out += 16;
    }
    if (five) {
        const uint32_t high = load32(p);
        uint32_t word = 0;
        for (int j = 0; j < 8; ++j) word |= spread(high >> (4 * j)) << j;
        store32(out + 4 * lane, word);
        p += 4, out += 32;
    }
    for (int v = 0; v < 4; ++v) store32(out + 32 * v + 4 * lane, load32(p + 4 * v));  // the file pairs the same nibbles
}

void pack_super(Kind kind, const uint8_t* raw, int lane, uint8_t* unit) {
    uint32_t codes[8];
    const Layout l = layout(kind);
    for (int g = 0; g < 8; ++g) {
        uint8_t* group = unit + l.header_bytes + g * l.group_bytes;
        if (kind == Kind::K4 || kind == Kind::K5) {  // d, dmin, scales[12], (qh[32]), qs[128]
            if (g == 0) copy_half(unit + 2 * lane, raw), copy_half(unit + 16 + 2 * lane, raw + 2);
            super_scale(raw + 4, g, group + lane, group + 8 + lane);
            super_nibbles(raw + (kind == Kind::K4 ? 16 : 48), g, codes);
            if (kind == Kind::K5) {
                uint32_t word = 0;
                for (int j = 0; j < 8; ++j) word |= ((load32(raw + 16 + 4 * j) >> g) & 0x01010101u) << j;
                store32(group + 16 + 4 * lane, word);
            }
            put_nibbles(group + (kind == Kind::K4 ? 16 : 48), lane, codes);
        } else if (kind == Kind::K6) {  // ql[128], qh[64], scales[16], d
            if (g == 0) copy_half(unit + 2 * lane, raw + 208);
            group[lane] = raw[192 + 2 * g];
            group[8 + lane] = raw[192 + 2 * g + 1];
            const uint8_t* ql = raw + 64 * (g / 4) + 32 * (g % 2);
            const uint8_t* qh = raw + 128 + 32 * (g / 4);
            for (int j = 0; j < 8; ++j)
                codes[j] = ((load32(ql + 4 * j) >> (g % 4 < 2 ? 0 : 4)) & 0x0f0f0f0fu) | (((load32(qh + 4 * j) >> (2 * (g % 4))) & 0x03030303u) << 4);
            put_pairs(group + 16, lane, codes, 4);
            put_nibbles(group + 80, lane, codes);
        } else if (kind == Kind::K3) {  // hmask[32], qs[64], scales[12], d
            if (g == 0) copy_half(unit + 2 * lane, raw + 108);
            for (int h = 0; h < 2; ++h) {
                const int s = 2 * g + h;
                const int low = s < 8 ? raw[96 + s] & 15 : raw[96 + s - 8] >> 4;
                const int high = (raw[104 + s % 4] >> (2 * (s / 4))) & 3;
                group[8 * h + lane] = static_cast<uint8_t>((low | (high << 4)) - 32);
            }
            const uint8_t* qs = raw + 32 + 32 * (g / 4);
            for (int j = 0; j < 8; ++j)
                codes[j] = ((load32(qs + 4 * j) >> (2 * (g % 4))) & 0x03030303u) | (((load32(raw + 4 * j) >> g) & 0x01010101u) << 2);
            put_nibbles(group + 16, lane, codes);
        } else {  // K2: scales[16], qs[64], d, dmin
            if (g == 0) copy_half(unit + 2 * lane, raw + 80), copy_half(unit + 16 + 2 * lane, raw + 82);
            for (int h = 0; h < 2; ++h) {
                group[8 * h + lane] = raw[2 * g + h] & 15;
                group[16 + 8 * h + lane] = raw[2 * g + h] >> 4;
            }
            const uint8_t* qs = raw + 16 + 32 * (g / 4);
            for (int j = 0; j < 8; ++j) codes[j] = (load32(qs + 4 * j) >> (2 * (g % 4))) & 0x03030303u;
            put_nibbles(group + 32, lane, codes);
        }
    }
}

}  // namespace

bool kind_of(const std::string& format, Kind* kind) {
    const FileFormat* f = find(format);
    if (f) *kind = f->kind;
    return f != nullptr;
}

size_t row_bytes(const std::string& format, int columns) {
    const FileFormat* f = find(format);
    return f && columns % f->group == 0 ? static_cast<size_t>(columns / f->group) * f->bytes : 0;
}

void pack_panel(const std::string& format, const Matrix& w, const uint8_t* const rows[8], uint8_t* panel, uint8_t* low) {
    const FileFormat* f = find(format);
    const Layout l = layout(w.kind);
    if (w.columns % 32 || std::find(rows, rows + 8, nullptr) != rows + 8) {  // not every byte will be written
        std::memset(panel, 0, w.panel_bytes());
        if (l.low_bytes) std::memset(low, 0, w.low_panel_bytes());
    }
    for (int lane = 0; lane < 8; ++lane) {
        const uint8_t* raw = rows[lane];
        if (!raw) continue;
        if (is_float(w.kind)) {
            const int size = f->bytes;
            for (int k = 0; k < w.columns; ++k) std::memcpy(panel + static_cast<size_t>(8 * k + lane) * size, raw + static_cast<size_t>(k) * size, size);
        } else if (l.groups_per_unit == 1) {
            for (int g = 0; g < w.groups(); ++g)
                pack_simple(w.kind, raw + static_cast<size_t>(g) * f->bytes, lane, panel + static_cast<size_t>(g) * l.group_bytes, low + static_cast<size_t>(g) * l.low_bytes);
        } else {
            const size_t unit = l.header_bytes + 8 * static_cast<size_t>(l.group_bytes);
            for (int u = 0; u < w.columns / 256; ++u) pack_super(w.kind, raw + static_cast<size_t>(u) * f->bytes, lane, panel + u * unit);
        }
    }
}

}  // namespace cutaway
