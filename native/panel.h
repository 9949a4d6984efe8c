// Panels: how weights lie in memory for the kernels.
//
// Eight rows of a matrix make a panel. Inside it the same 32 columns of all eight rows lie together (a group of the
// panel), four consecutive columns of a row in one 32-bit lane, so one 32-byte load holds 8 rows x 4 columns and the
// sums of eight rows come out in eight lanes: no horizontal additions. Codes keep the file's own number of bits.
//
//   S (scale)         [d f16 x8] [bit 4 of each code, 32 B]? [low nibbles, 128 B]                Q4_0 Q5_0
//   S8                as S5 with the high five bits of (weight + 128), and the low three bits in a second plane   Q8_0
//   M (scale, min)    [d f16 x8] [m f16 x8] [bit 4, 32 B]? [low nibbles, 128 B]                  Q4_1 Q5_1
//   K (super-groups)  eight groups behind one header [d f16 x8] [dmin f16 x8]?, a group being
//       K4 K5         [scale u8 x8] [min u8 x8] [bit 4, 32 B]? [low nibbles, 128 B]              Q4_K Q5_K
//       K6            [scale s8 x8, columns 0-15] [scale s8 x8, columns 16-31] [bits 4-5, 64 B] [low nibbles, 128 B]  Q6_K
//       K3            as K6 without bits 4-5 (3-bit codes widened to 4)                          Q3_K
//       K2            [scale u8 x16] [min u8 x16] [low nibbles, 128 B] (2-bit codes widened to 4) Q2_K
//   F                 [value x8] for each column                                                 F32 F16 BF16
//
// Nibbles: vector v (0..3), lane r holds columns 4v..4v+3 of row r in the low nibbles of its four bytes and columns
// 16+4v..16+4v+3 in the high ones. Bit 4: byte 4r+i holds, in bit j, the bit of column 4j+i of row r. Two-bit fields:
// vector v (0..1), byte 4r+i, bits 2f..2f+1 belong to column 16v+4f+i.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cutaway {

enum class Kind { S4, S5, S8, M4, M5, K2, K3, K4, K5, K6, F32, F16, BF16 };

struct Layout {
    int groups_per_unit;  // groups behind one header
    int header_bytes;
    int group_bytes;      // without the header
    int low_bytes;        // second plane, a group
};

inline Layout layout(Kind kind) {
    switch (kind) {
        case Kind::S4: return {1, 0, 16 + 128, 0};
        case Kind::S5: return {1, 0, 16 + 32 + 128, 0};
        case Kind::S8: return {1, 0, 16 + 32 + 128, 64 + 32};
        case Kind::M4: return {1, 0, 32 + 128, 0};
        case Kind::M5: return {1, 0, 32 + 32 + 128, 0};
        case Kind::K2: return {8, 32, 32 + 128, 0};
        case Kind::K3: return {8, 16, 16 + 128, 0};
        case Kind::K4: return {8, 32, 16 + 128, 0};
        case Kind::K5: return {8, 32, 16 + 32 + 128, 0};
        case Kind::K6: return {8, 16, 16 + 64 + 128, 0};
        case Kind::F32: return {1, 0, 32 * 32, 0};
        case Kind::F16: return {1, 0, 32 * 16, 0};
        case Kind::BF16: return {1, 0, 32 * 16, 0};
    }
    return {1, 0, 0, 0};
}

inline bool is_float(Kind kind) { return kind == Kind::F32 || kind == Kind::F16 || kind == Kind::BF16; }

// A packed matrix [rows, columns]: panels of 8 rows (the last one filled up with zeros), groups of 32 columns.
struct Matrix {
    Kind kind;
    int rows, columns;
    uint8_t* data = nullptr;  // panels one after another
    uint8_t* low = nullptr;   // S8: the low three bits, panels one after another

    int panels() const { return (rows + 7) / 8; }
    int groups() const { return (columns + 31) / 32; }
    size_t panel_bytes() const {
        const Layout l = layout(kind);
        const int units = (groups() + l.groups_per_unit - 1) / l.groups_per_unit;
        return static_cast<size_t>(units) * l.header_bytes + static_cast<size_t>(groups()) * l.group_bytes;
    }
    size_t low_panel_bytes() const { return static_cast<size_t>(groups()) * layout(kind).low_bytes; }
    size_t bytes() const { return panels() * (panel_bytes() + low_panel_bytes()); }
};

}  // namespace cutaway
