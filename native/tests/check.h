// What the tests in this folder share: random numbers, exactly sized memory, and a check that counts.
//
// Every array a kernel is given has exactly the size its header promises to need, so that AddressSanitizer sees the
// first byte read or written past it.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../kernels.h"
#include "../pack.h"

namespace test {

inline int failures = 0, checks = 0;

inline void check(bool fine, const std::string& what) {
    ++checks;
    if (fine) return;
    if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

inline std::string say(std::initializer_list<std::pair<const char*, long>> values, const std::string& before) {
    std::string s = before;
    for (const auto& [name, value] : values) s += std::string(" ") + name + " " + std::to_string(value);
    return s;
}

class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint64_t bits() {  // splitmix64
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
    float uniform(float low, float high) { return low + (high - low) * static_cast<float>(bits() >> 40) / 16777216.0f; }
    std::vector<float> floats(size_t n, float size = 1.0f) {
        std::vector<float> v(n);
        for (float& x : v) x = uniform(-size, size);
        return v;
    }

   private:
    uint64_t state_;
};

// Memory of exactly n values; a vector may keep more than it says.
template <class T> class Exact {
   public:
    explicit Exact(size_t n) : size_(n), data_(new T[n]()) {}
    explicit Exact(const std::vector<T>& from) : Exact(from.size()) {
        if (size_) std::memcpy(data_.get(), from.data(), size_ * sizeof(T));
    }
    T* get() { return data_.get(); }
    const T* get() const { return data_.get(); }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }
    size_t size() const { return size_; }
    bool same_bits(const Exact& other) const { return size_ == other.size_ && (size_ == 0 || std::memcmp(get(), other.get(), size_ * sizeof(T)) == 0); }

   private:
    size_t size_;
    std::unique_ptr<T[]> data_;
};

struct FormatInfo { const char* name; int group; int scale_at; int min_at; };  // where a group holds its halves; -1: none
constexpr FormatInfo kFormats[] = {
    {"Q4_0", 32, 0, -1}, {"Q4_1", 32, 0, 2}, {"Q5_0", 32, 0, -1}, {"Q5_1", 32, 0, 2}, {"Q8_0", 32, 0, -1}, {"Q2_K", 256, 80, 82}, {"Q3_K", 256, 108, -1},
    {"Q4_K", 256, 0, 2}, {"Q5_K", 256, 0, 2}, {"Q6_K", 256, 208, -1}, {"F32", 1, -1, -1}, {"F16", 1, -1, -1}, {"BF16", 1, -1, -1},
};

inline uint16_t small_half(Random& random) {  // +-[2^-8, 2^-4)
    return static_cast<uint16_t>((random.bits() & 0x83ffu) | (static_cast<unsigned>(7 + random.below(4)) << 10));
}

// File rows of a format with values of a moderate size.
inline std::vector<uint8_t> file_rows(const FormatInfo& f, int rows, int columns, Random& random) {
    const size_t stride = cutaway::row_bytes(f.name, columns);
    std::vector<uint8_t> data(rows * stride);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.bits());
    const std::string name = f.name;
    if (name == "F32" || name == "BF16" || name == "F16") {
        for (size_t i = 0; i < static_cast<size_t>(rows) * columns; ++i) {
            const float value = random.uniform(-1.0f, 1.0f);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            const uint16_t upper = static_cast<uint16_t>(bits >> 16), half = small_half(random);
            if (name == "F32") std::memcpy(&data[4 * i], &value, 4);
            else std::memcpy(&data[2 * i], name == "BF16" ? &upper : &half, 2);
        }
        return data;
    }
    const size_t bytes = cutaway::row_bytes(f.name, f.group);
    for (size_t at = 0; at < data.size(); at += bytes)
        for (const int field : {f.scale_at, f.min_at})
            if (field >= 0) {
                const uint16_t half = small_half(random);
                std::memcpy(&data[at + static_cast<size_t>(field)], &half, 2);
            }
    return data;
}

// A matrix packed into memory of exactly its size.
struct PackedMatrix {
    cutaway::Matrix w{};
    Exact<uint8_t> data, low;
    PackedMatrix(const FormatInfo& f, int rows, int columns, const Exact<uint8_t>& file) : PackedMatrix(shape(f, rows, columns)) {
        const size_t stride = cutaway::row_bytes(f.name, columns);
        for (int p = 0; p < w.panels(); ++p) {
            const uint8_t* source[8];
            for (int r = 0; r < 8; ++r) source[r] = 8 * p + r < rows ? file.get() + static_cast<size_t>(8 * p + r) * stride : nullptr;
            cutaway::pack_panel(f.name, w, source, w.data + p * w.panel_bytes(), w.low ? w.low + p * w.low_panel_bytes() : nullptr);
        }
    }

   private:
    explicit PackedMatrix(const cutaway::Matrix& shape) : w(shape), data(shape.panels() * shape.panel_bytes()), low(shape.panels() * shape.low_panel_bytes()) {
        w.data = data.get();
        w.low = low.size() ? low.get() : nullptr;
    }
    static cutaway::Matrix shape(const FormatInfo& f, int rows, int columns) {
        cutaway::Matrix m{cutaway::Kind::F32, rows, columns};
        cutaway::kind_of(f.name, &m.kind);
        return m;
    }
};

inline std::vector<const cutaway::Kernels*> every_isa() {
    std::vector<const cutaway::Kernels*> found;
    for (const char* name : {"scalar", "avx2", "avx512vnni"})
        if (const cutaway::Kernels* k = cutaway::kernels_for(name)) found.push_back(k);
    return found;
}

void matmul();
void rows();
void attention();
void pool();
void plan();

}  // namespace test
