// The kernels: one function pointer each, with its formula and shapes. An instruction set fills one table
// (kernels_scalar.cpp, kernels_avx2.cpp, kernels_avx512vnni.cpp, all from kernels.inl); dispatch.cpp picks one.
//
// Every kernel computes a row of its result from that row's inputs in one fixed order of operations, whatever the
// number of tokens, threads or neighbours: that is where the laws of the engine come from.
#pragma once
#include <cstdint>

#include "panel.h"

namespace cutaway {

// What a kernel needs to know of 32 activations quantised to int8.
struct GroupSums {
    float scale;         // x ~ scale * code
    float scaled_sum;    // scale * (sum of the 32 codes)
    int32_t sum;         // sum of the 32 codes
    int32_t sum_low;     // sum of the first 16
};

// out[t, r] = sum_k w[r, k] * x[t, k]  (+ bias[r]) (+ residual[t, r]), for the rows of panels [panel_begin, panel_end).
// x is given as float32 [num_tokens, columns] or, for int8 activations, as codes [num_tokens, 32 * groups] with sums
// [num_tokens, groups]. Integer products are exact; a group's dot product times its scales is added in float32, groups
// in rising order. Float weights: within a group of 32 columns, columns 0-15 and 16-31 make two chains of fused
// multiply-adds, then groups in rising order.
struct MatmulArgs {
    const Matrix* w;
    int panel_begin, panel_end;
    int num_tokens;
    const float* x;
    const int8_t* codes;  // null: float32 activations
    const GroupSums* sums;
    const float* bias;      // [rows] or null
    const float* residual;  // [num_tokens, rows] or null
    float* out;             // [num_tokens, rows]
    // Coded products of more than kFewTokens tokens: with `up`, a matrix of the same kind and size, out is
    // silu(w x + bias) * (up x + up_bias), and neither product goes through memory.
    const Matrix* up = nullptr;
    const float* up_bias = nullptr;
};

enum class KvType { F16, F32, Q8 };

// One layer's keys and values, in blocks: K [num_blocks, num_kv_heads, head_dim, block_size],
// V [num_blocks, num_kv_heads, block_size, head_dim]; Q8 scales (f16) per 32 values along head_dim.
struct KvLayer {
    void* k;
    void* v;
    uint16_t* k_scale;  // [num_blocks, num_kv_heads, head_dim / 32, block_size] or null
    uint16_t* v_scale;  // [num_blocks, num_kv_heads, block_size, head_dim / 32] or null
    KvType k_type, v_type;
    int num_kv_heads, head_dim, block_size;
};

// Attention of the query heads that share a KV head, of one token or of several that see the same keys, over keys
// [key_begin, key_end), for each row r = (token, head):
//   s[r, j] = scale * q[r] . k[j];  m[r] = max_j s;  l[r] = sum_j exp(s - m);  acc[r] = sum_j exp(s - m) v[j]
struct AttendArgs {
    const KvLayer* kv;
    const int32_t* block_table;
    int kv_head;
    int group;               // query heads
    int tokens;
    const float* q;          // [tokens, group, head_dim], tokens q_stride floats apart
    size_t q_stride;
    float scale;
    int key_begin, key_end;  // key_end - key_begin <= kSpan
    bool ahead;              // fetch blocks ahead: a lone query reads keys and values that are in no cache yet
    float* m;                // [tokens, group]
    float* l;                // [tokens, group]
    float* acc;              // [tokens, group, head_dim]
};

constexpr int kMaxRows = 14;    // rows that meet a key together
constexpr int kSpan = 256;      // keys of one attention span; spans are merged in rising order
constexpr int kMaxHeadDim = 256;
constexpr int kFewTokens = 8;   // so many meet the weights in registers
constexpr int kTokenBlock = 256; // tokens whose activations stay in the second-level cache while panels pass

struct Kernels {
    const char* name;
    void (*matmul)(const MatmulArgs&);
    // The high five bits of an S8 matrix alone: out[r] = sum_g d[r, g] scale[g] sum_k (8 h[r, k] + 3.5 - 128) codes[k].
    void (*matmul_high)(const Matrix& w, int panel_begin, int panel_end, const int8_t* codes, const GroupSums* sums, float* out);
    // What the high bits of an S8 panel leave out, over groups [begin, end): norm[r] = |d (l - 3.5)|, scale[r] = sum of |d|.
    void (*measure_low)(const Matrix& w, int panel, int begin, int end, float* norm, float* scale);
    // Eight rows of a packed matrix as float32 [columns, 8].
    void (*unpack_panel)(const Matrix& w, int panel, float* out);
    // code = round(x * 127 / amax), scale = amax / 127, over groups of 32; n is a multiple of 32.
    void (*quantize)(const float* x, int n, int8_t* codes, GroupSums* sums);
    // out = weight * (x / sqrt(mean(x^2) + eps)); the mean is taken in float64.
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Rotate pairs (i, i + head_dim / 2): out = (a cos - b sin, b cos + a sin); cos, sin [head_dim / 2].
    void (*rope)(const float* x, const float* cos, const float* sin, int head_dim, float* out);
    void (*silu_mul)(const float* gate, const float* up, int n, float* out);  // gate / (1 + exp(-gate)) * up
    void (*add)(const float* a, const float* b, int n, float* out);
    // Put one token's key and value of one KV head into its slot.
    void (*store_kv)(const KvLayer& kv, int slot, int kv_head, const float* k, const float* v);
    void (*attend)(const AttendArgs&);
    // out = (sum_s exp(m_s - M) acc_s) / (sum_s exp(m_s - M) l_s), spans in rising order; strides in floats.
    void (*merge_spans)(const float* m, const float* l, const float* acc, int num_spans, int stride_ml, int stride_acc, int head_dim, float* out);
    float (*max_value)(const float* x, int n);
    // Reads `bytes` (a multiple of 128) once, fetching ahead or leaving that to the processor; for measuring memory.
    float (*read_stream)(const uint8_t* p, size_t bytes, bool ahead);
};

const Kernels* kernels_scalar();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512vnni();

// The table of `isa`, or of the best instruction set this processor has when `isa` is null or empty.
// Null when the processor (or this build) lacks it.
const Kernels* kernels_for(const char* isa);

}  // namespace cutaway
