// A compiled Program: phases over planned buffers, run by all threads of a pool together.
//
// `forward/native.py` lays the phases out (one operation each, or several fused into one); this file runs them. A phase
// is separated from the next by a barrier. Fusing changes which values touch memory, never how they are computed, so a
// fused plan gives the same bits as an unfused one. Read next: kernels.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace cutaway {

// Memory in huge pages where the system allows: weights are streamed, and with small pages the page tables are streamed
// beside them (measured: 30 GB/s with 4 KiB pages, 53 GB/s with 2 MiB ones on the same cores).
void* allocate(size_t bytes);

// One stretch of memory handed out in order, for all packed weights of a model.
class Arena {
   public:
    explicit Arena(size_t bytes) : data_(static_cast<uint8_t*>(allocate(bytes))), size_(bytes) {}
    ~Arena() { std::free(data_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* take(size_t bytes) {
        const size_t rounded = (bytes + 63) / 64 * 64;
        if (used_ + rounded > size_) throw std::bad_alloc();
        used_ += rounded;
        return data_ + used_ - rounded;
    }
    size_t bytes() const { return size_; }

   private:
    uint8_t* data_;
    size_t size_, used_ = 0;
};

// Memory aligned to a cache line, grown on demand, its contents lost when it grows.
template <class T> class Scratch {
   public:
    ~Scratch() { std::free(data_); }
    Scratch() = default;
    Scratch(Scratch&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return data_; }
    size_t bytes() const { return size_ * sizeof(T); }
    void release() {
        std::free(data_);
        data_ = nullptr, size_ = 0;
    }
    void reserve(size_t size) {
        if (size <= size_) return;
        release();
        data_ = static_cast<T*>(allocate(size * sizeof(T)));
        size_ = size;
    }

   private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

// This thread's share of n things, whole multiples of `unit` where possible.
struct Range { int begin, end; };
inline Range share(int n, int thread, int threads, int unit = 1) {
    const int64_t units = (n + unit - 1) / unit;
    const int begin = static_cast<int>(units * thread / threads) * unit, end = static_cast<int>(units * (thread + 1) / threads) * unit;
    return {std::min(begin, n), std::min(end, n)};
}

constexpr int kTokenTile = 4;  // tokens that walk over a span of keys together

// A weight matrix as packed at load.
struct Packed {
    Matrix w{};
    std::shared_ptr<Arena> arena;  // where the panels lie
    Scratch<float> low_norm;       // S8 output heads: [kHeadParts, rows padded to 8], see head.cpp
};
constexpr int kHeadParts = 4;

// Measures the low bits of a packed S8 matrix, which lets a plan find its largest products from the high bits.
void measure_low_bits(Packed& packed, const Kernels& kernels, Pool& pool);

// A table of rows as its file holds it, for the embedding.
struct Table {
    std::string format;
    const uint8_t* data;
    int rows, columns;
    size_t row_bytes;
};

struct Linear {
    std::shared_ptr<Packed> w;
    std::shared_ptr<std::vector<float>> bias;  // or null
    int out;                                   // buffer
    int residual;                              // buffer added to the result, or -1
};

enum class PhaseKind { Embed, Norm, HeadNorm, Rope, Attention, Matmul, SiluMul, Add, SelectRows, TopHead };

struct Phase {
    PhaseKind kind{};
    int in = -1, in2 = -1, in3 = -1, out = -1;     // buffers
    std::shared_ptr<std::vector<float>> weight;    // norm weight
    std::shared_ptr<std::vector<float>> weight2;   // k norm weight of a fused attention
    std::vector<Linear> linears;                   // matmul: one input, several matrices
    bool norm = false;                             // matmul: normalise the input first
    bool silu = false;                             // matmul: out = silu(linears[0]) * linears[1]
    bool rope = false;                             // attention: rotate q and k first (after the head norms, if any)
    int layer = -1;
    int width = 0;
    bool outputs = false;                          // rows are output rows, not tokens
    std::vector<double> ns;                        // time of the last run, per call
};

struct Shape {
    int num_heads, num_kv_heads, head_dim, num_layers;
    float eps;
};

struct BatchView {  // the arrays of a step, kept by the caller
    const int32_t *token_ids, *positions, *slots, *query_starts, *context_lengths, *block_tables, *output_rows;
    int num_tokens, num_seqs, max_blocks, num_outputs;
};

class Plan {
   public:
    Plan(const Kernels* kernels, std::shared_ptr<Pool> pool, const Shape& shape, bool int8_activations);

    int add_buffer(int width, bool outputs);
    int add_phase(Phase phase);
    void set_embedding(const Table& table) { embedding_ = table; }
    void set_rope(const float* cos, const float* sin, int positions) { cos_ = cos, sin_ = sin, rope_positions_ = positions; }
    void bind_kv(std::vector<KvLayer> layers, int num_blocks) { kv_ = std::move(layers), num_blocks_ = num_blocks; }

    // Checks a step and makes room for it. Throws std::invalid_argument naming the array at fault.
    void begin(const BatchView& batch, int head_top_k);
    // Runs phases [first, last) of the step begun; `profile` keeps their times. `store_only`: the last of them is an
    // attention whose result nobody will read, so it only stores its keys and values.
    void run(int first, int last, bool profile, bool store_only = false);

    float* buffer(int id) const { return buffers_[id].data.get(); }
    int buffer_rows(int id) const { return buffers_[id].outputs ? batch_.num_outputs : batch_.num_tokens; }
    int buffer_width(int id) const { return buffers_[id].width; }
    const std::vector<Phase>& phases() const { return phases_; }
    size_t scratch_bytes() const;
    const std::vector<int32_t>& top_ids() const { return top_ids_; }
    const std::vector<float>& top_values() const { return top_values_; }
    int64_t head_rows_finished() const { return head_rows_finished_; }

   private:
    struct Buffer { int width; bool outputs; Scratch<float> data; };
    struct Local {  // one thread's own scratch
        Scratch<float> normed, spans, panel;
        Scratch<int8_t> codes;
        Scratch<GroupSums> sums;
    };
    struct Input { const float* x; const int8_t* codes; const GroupSums* sums; };

    void execute(const Phase& phase, int thread, bool store_only);
    void embed(const Phase& phase, int thread);
    bool gated(const Phase& phase) const;
    void matmul(const Phase& phase, int thread);
    Input prepare(const Phase& phase, int thread, int tokens, int columns, bool quantize);
    void attention(const Phase& phase, int thread, bool store_only);
    void top_head(const Phase& phase, int thread);
    bool screens(const Phase& phase) const;
    void screen_head(const Phase& phase, int thread);
    void keep_top(int row, std::vector<std::pair<float, int32_t>>& found);
    int rows(const Phase& phase) const { return phase.outputs ? batch_.num_outputs : batch_.num_tokens; }

    const Kernels* k_;
    std::shared_ptr<Pool> pool_;
    Shape shape_;
    bool int8_;
    std::vector<Buffer> buffers_;
    std::vector<Phase> phases_;
    Table embedding_{};
    const float *cos_ = nullptr, *sin_ = nullptr;
    int rope_positions_ = 0;
    std::vector<KvLayer> kv_;
    int num_blocks_ = 0;

    BatchView batch_{};
    std::vector<int32_t> seq_of_token_;
    int longest_ = 0;           // longest context of the step
    bool split_spans_ = false;  // few tokens: spread attention spans over the threads
    std::vector<std::unique_ptr<Local>> locals_;
    Scratch<float> normed_, partial_m_, partial_l_, partial_acc_, high_;
    Scratch<int8_t> codes_;
    Scratch<GroupSums> sums_;
    int top_k_ = 0;
    std::vector<int32_t> top_ids_;
    std::vector<float> top_values_;
    std::vector<std::vector<std::pair<float, int32_t>>> candidates_;
    std::vector<std::vector<int>> panels_left_;
    int64_t head_rows_finished_ = 0;
    bool screening_ = false;  // this step tries the exact head
    bool screened_ = false;   // and it has given the top logits
    struct Screening { int pause = 0, retry = 4; };
    std::map<int, Screening> screenings_;  // by k: steps to let pass before trying again
};

// Lets go of the resident pages of a read-only file mapping; they come back from the file when touched.
void drop_pages(const uint8_t* begin, const uint8_t* end);

// Packs a matrix from file rows, in parallel. `mapped`: the rows are a read-only file mapping whose pages need not stay
// resident once they are packed.
std::shared_ptr<Packed> pack_matrix(const std::string& format, const uint8_t* data, int rows, int columns, bool mapped, Pool& pool, std::shared_ptr<Arena> arena);

// Bytes of an arena that pack_matrix will take for a matrix; 0 where there is no kernel for the format.
size_t packed_bytes(const std::string& format, int rows, int columns);

}  // namespace cutaway
