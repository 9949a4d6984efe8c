// The Python module `cutaway._native`: packing, plans, and single kernels for the tests. Every array is checked here,
// the door between Python and the kernels; long calls hold no GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "pack.h"
#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace cutaway;

namespace {

template <class T> using Vec = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Mat = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Numpy2 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

void require(bool fine, const std::string& what) {
    if (!fine) throw std::invalid_argument(what);
}

template <class T> nb::ndarray<nb::numpy, T> owned(std::vector<T>&& values, std::vector<size_t> shape) {
    auto* kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner);
}

const Kernels* pick(const std::string& isa) {
    const Kernels* k = kernels_for(isa.c_str());
    require(k != nullptr, "instruction set '" + isa + "' is not available on this processor");
    return k;
}

std::shared_ptr<Packed> pack(const std::string& format, Mat<uint8_t> data, int columns, Pool& pool, bool mapped, std::shared_ptr<Arena> arena) {
    require(row_bytes(format, columns) == data.shape(1), "packed rows: found " + std::to_string(data.shape(1)) + " bytes a row, expected " + std::to_string(row_bytes(format, columns)));
    const uint8_t* p = data.data();
    const int rows = static_cast<int>(data.shape(0));
    nb::gil_scoped_release release;
    if (!arena) arena = std::make_shared<Arena>(packed_bytes(format, rows, columns));
    return pack_matrix(format, p, rows, columns, mapped, pool, std::move(arena));
}

// All matrices of a model in one call, so that whoever else holds the GIL meanwhile is not in the way.
std::vector<std::shared_ptr<Packed>> pack_all(const std::vector<std::string>& formats, const std::vector<nb::object>& data, const std::vector<int>& columns, const std::vector<bool>& mapped, int head, const std::string& isa, Pool& pool, std::shared_ptr<Arena> arena) {
    const Kernels& kernels = *pick(isa);
    std::vector<Mat<uint8_t>> arrays;
    for (size_t i = 0; i < data.size(); ++i) {
        arrays.push_back(nb::cast<Mat<uint8_t>>(data[i]));
        require(row_bytes(formats[i], columns[i]) == arrays[i].shape(1), "packed rows: found " + std::to_string(arrays[i].shape(1)) + " bytes a row, expected " + std::to_string(row_bytes(formats[i], columns[i])));
    }
    std::vector<std::shared_ptr<Packed>> packed(arrays.size());
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < arrays.size(); ++i) packed[i] = pack_matrix(formats[i], arrays[i].data(), static_cast<int>(arrays[i].shape(0)), columns[i], mapped[i], pool, arena);
        for (size_t i = 0; i < arrays.size(); ++i)  // reading one tensor brought edges of its neighbours back
            if (mapped[i]) drop_pages(arrays[i].data(), arrays[i].data() + arrays[i].nbytes());
        if (head >= 0 && packed[head]->w.kind == Kind::S8) measure_low_bits(*packed[head], kernels, pool);
    }
    return packed;
}

std::shared_ptr<std::vector<float>> vector_of(Vec<float> v) { return std::make_shared<std::vector<float>>(v.data(), v.data() + v.shape(0)); }

KvType kv_type(const std::string& name) {
    if (name == "f16") return KvType::F16;
    if (name == "f32") return KvType::F32;
    require(name == "q8_0", "unknown KV cache type " + name);
    return KvType::Q8;
}

// y = x w^T through the kernels alone.
Numpy2 matmul_alone(const Packed& w, Mat<float> x, const std::string& isa, bool int8, Pool& pool, nb::object bias, nb::object residual, std::shared_ptr<Packed> up, nb::object up_bias) {
    const Kernels* k = pick(isa);
    const int tokens = static_cast<int>(x.shape(0)), columns = w.w.columns, rows = w.w.rows;
    require(static_cast<int>(x.shape(1)) == columns, "matmul: columns differ");
    const bool coded = int8 && !is_float(w.w.kind);
    std::vector<int8_t> codes;
    std::vector<GroupSums> sums;
    if (coded) {
        codes.resize(static_cast<size_t>(tokens) * columns);
        sums.resize(static_cast<size_t>(tokens) * columns / 32);
        for (int t = 0; t < tokens; ++t) k->quantize(x.data() + static_cast<size_t>(t) * columns, columns, codes.data() + static_cast<size_t>(t) * columns, sums.data() + static_cast<size_t>(t) * columns / 32);
    }
    auto bias_of = [&](const nb::object& given, Vec<float>& values) -> const float* {
        if (given.is_none()) return nullptr;
        values = nb::cast<Vec<float>>(given);
        require(values.shape(0) == static_cast<size_t>(rows), "matmul: the bias is not one value a row");
        return values.data();
    };
    Vec<float> bias_values, up_bias_values;
    const float *b = bias_of(bias, bias_values), *up_b = bias_of(up_bias, up_bias_values), *res = nullptr;
    Mat<float> residual_values;
    if (!residual.is_none()) {
        residual_values = nb::cast<Mat<float>>(residual);
        require(residual_values.shape(0) == static_cast<size_t>(tokens) && residual_values.shape(1) == static_cast<size_t>(rows), "matmul: the residual is not [num_tokens, rows]");
        res = residual_values.data();
    }
    if (up) {
        require(up->w.kind == w.w.kind && up->w.rows == rows && up->w.columns == columns, "matmul: up is not a matrix of the same kind and size");
        require(coded && tokens > kFewTokens && !res, "matmul: up takes coded products of many tokens, without a residual");
    }
    std::vector<float> out(static_cast<size_t>(tokens) * rows);
    if (tokens > 0)
        pool.run([&](int thread) {
            const int panels = w.w.panels(), begin = static_cast<int>(static_cast<int64_t>(panels) * thread / pool.threads()), end = static_cast<int>(static_cast<int64_t>(panels) * (thread + 1) / pool.threads());
            k->matmul({&w.w, begin, end, tokens, x.data(), coded ? codes.data() : nullptr, sums.data(), b, res, out.data(), up ? &up->w : nullptr, up_b});
        });
    return Numpy2(owned(std::move(out), {static_cast<size_t>(tokens), static_cast<size_t>(rows)}));
}

// Bytes a second that `threads` threads read together from memory: the best of `repeats` passes over `bytes`.
double read_bandwidth(int threads, size_t bytes, int repeats) {
    const Kernels* k = pick("");
    Pool pool(threads);
    Scratch<uint8_t> memory;
    const size_t part = bytes / threads / 4096 * 4096;
    memory.reserve(part * threads);
    std::vector<float> sink(static_cast<size_t>(threads) * 16);
    pool.run([&](int t) { std::memset(memory.get() + part * t, t + 1, part); });
    double best = 0;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](int t) { sink[16 * t] += k->read_stream(memory.get() + part * t, part, i % 2 == 1); });
        const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::max(best, static_cast<double>(part * threads) / s);
    }
    return best;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels of Cutaway: packed weights, compiled plans, and the thread pool.";

    m.def("isas", [] {
        std::vector<std::string> names;
        for (const char* name : {"avx512vnni", "avx2", "scalar"})
            if (kernels_for(name)) names.emplace_back(name);
        return names;
    }, "Instruction sets this build can use on this processor, best first.");
    m.def("usable_cores", &usable_cores, "Physical cores within this process's affinity and cgroup quota.");
    m.def("read_bandwidth", &read_bandwidth, "threads"_a, "bytes"_a = size_t{1} << 28, "repeats"_a = 8, nb::call_guard<nb::gil_scoped_release>(),
          "Bytes a second read from memory by `threads` threads together.");
    nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::threads);

    nb::class_<Arena>(m, "Arena").def(nb::init<size_t>(), "bytes"_a).def_prop_ro("nbytes", &Arena::bytes);
    m.def("packed_bytes", &packed_bytes, "format"_a, "rows"_a, "columns"_a, "Bytes of an arena that `pack` takes; 0 for a format without a kernel.");

    nb::class_<Packed>(m, "Packed")
        .def_prop_ro("nbytes", [](const Packed& p) { return p.w.bytes(); })
        .def_prop_ro("shape", [](const Packed& p) { return nb::make_tuple(p.w.rows, p.w.columns); });
    m.def("pack", &pack, "format"_a, "data"_a, "columns"_a, "pool"_a, "mapped"_a = false, "arena"_a.none() = nb::none(), "File rows, uint8 [rows, row_bytes] -> panels.");
    m.def("pack_all", &pack_all, "formats"_a, "data"_a, "columns"_a, "mapped"_a, "head"_a, "isa"_a, "pool"_a, "arena"_a,
          "Many matrices into one arena. `head`: index of the output head, whose low bits are measured for screening, or -1.");
    m.def("unpack", [](const Packed& p, const std::string& isa) {
        const Kernels* k = pick(isa);
        const size_t columns = p.w.columns, rows = p.w.rows;
        std::vector<float> panel(8 * static_cast<size_t>(p.w.groups()) * 32), out(rows * columns);
        for (int i = 0; i < p.w.panels(); ++i) {
            k->unpack_panel(p.w, i, panel.data());
            for (size_t r = 0; r < 8 && 8 * static_cast<size_t>(i) + r < rows; ++r)
                for (size_t c = 0; c < columns; ++c) out[(8 * static_cast<size_t>(i) + r) * columns + c] = panel[8 * c + r];
        }
        return Numpy2(owned(std::move(out), {rows, columns}));
    }, "packed"_a, "isa"_a = "", "Panels -> float32 [rows, columns].");
    m.def("matmul", &matmul_alone, "w"_a, "x"_a, "isa"_a, "int8"_a, "pool"_a, "bias"_a.none() = nb::none(), "residual"_a.none() = nb::none(), "up"_a.none() = nb::none(), "up_bias"_a.none() = nb::none(),
          "x [num_tokens, columns] -> x w^T [num_tokens, rows].");
    m.def("quantize", [](Mat<float> x, const std::string& isa) {
        const Kernels* k = pick(isa);
        const size_t tokens = x.shape(0), columns = x.shape(1), groups = columns / 32;
        require(columns % 32 == 0, "quantize: columns are not a multiple of 32");
        std::vector<int8_t> codes(tokens * columns);
        std::vector<GroupSums> sums(tokens * groups);
        std::vector<float> scales(tokens * groups);
        for (size_t t = 0; t < tokens; ++t) k->quantize(x.data() + t * columns, static_cast<int>(columns), codes.data() + t * columns, sums.data() + t * groups);
        for (size_t i = 0; i < sums.size(); ++i) scales[i] = sums[i].scale;
        return nb::make_tuple(owned(std::move(codes), {tokens, columns}), owned(std::move(scales), {tokens, groups}));
    }, "x"_a, "isa"_a = "", "float32 [num_tokens, columns] -> (codes int8, scales float32 [num_tokens, columns / 32]).");
    m.def("row_kernel", [](const std::string& name, Vec<float> a, Vec<float> b, float eps, const std::string& isa) {
        const Kernels* k = pick(isa);
        const int n = static_cast<int>(a.shape(0));
        require(a.shape(0) == b.shape(0), "row_kernel: lengths differ");
        std::vector<float> out(n);
        if (name == "rms_norm") k->rms_norm(a.data(), b.data(), n, eps, out.data());
        else if (name == "silu_mul") k->silu_mul(a.data(), b.data(), n, out.data());
        else if (name == "add") k->add(a.data(), b.data(), n, out.data());
        else require(false, "row_kernel: no kernel " + name);
        return owned(std::move(out), {static_cast<size_t>(n)});
    }, "name"_a, "a"_a, "b"_a, "eps"_a = 1e-6f, "isa"_a = "");

    nb::class_<Plan>(m, "Plan", nb::dynamic_attr())
        .def("__init__", [](Plan* self, const std::string& isa, std::shared_ptr<Pool> pool, int num_heads, int num_kv_heads, int head_dim, int num_layers, float eps, bool int8) {
            require(head_dim % 8 == 0 && head_dim <= kMaxHeadDim, "head_dim is not a multiple of 8 up to 256");
            require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "num_heads is not a multiple of num_kv_heads");
            new (self) Plan(pick(isa), std::move(pool), {num_heads, num_kv_heads, head_dim, num_layers, eps}, int8);
        }, "isa"_a, "pool"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "num_layers"_a, "eps"_a, "int8"_a)
        .def("buffer", &Plan::add_buffer, "width"_a, "outputs"_a)
        .def("embedding", [](Plan& p, const std::string& format, Mat<uint8_t> data, int columns) {
            p.set_embedding({format, data.data(), static_cast<int>(data.shape(0)), columns, data.shape(1)});
        }, "format"_a, "data"_a, "columns"_a, nb::keep_alive<1, 3>())
        .def("rope_tables", [](Plan& p, Mat<float> cos, Mat<float> sin) { p.set_rope(cos.data(), sin.data(), static_cast<int>(cos.shape(0))); },
             "cos"_a, "sin"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("bind_kv", [](Plan& p, const std::vector<nb::object>& k, const std::vector<nb::object>& v, const std::vector<nb::object>& ks, const std::vector<nb::object>& vs, const std::string& kt, const std::string& vt) {
            std::vector<KvLayer> layers;
            int blocks = 0;
            for (size_t i = 0; i < k.size(); ++i) {
                const auto keys = nb::cast<AnyArray>(k[i], false), values = nb::cast<AnyArray>(v[i], false);  // no copies
                require(keys.ndim() == 4 && values.ndim() == 4, "KV cache: arrays are not [num_blocks, num_kv_heads, ., .]");
                require(keys.shape(3) == values.shape(2) && keys.shape(2) == values.shape(3) && keys.shape(3) % 8 == 0, "KV cache: shapes of keys and values disagree");
                auto scales = [](const std::vector<nb::object>& list, size_t at) { return list.empty() ? nullptr : static_cast<uint16_t*>(nb::cast<AnyArray>(list[at], false).data()); };
                blocks = static_cast<int>(keys.shape(0));
                layers.push_back({keys.data(), values.data(), scales(ks, i), scales(vs, i), kv_type(kt), kv_type(vt), static_cast<int>(keys.shape(1)), static_cast<int>(keys.shape(2)), static_cast<int>(keys.shape(3))});
            }
            p.bind_kv(std::move(layers), blocks);
        }, "k"_a, "v"_a, "k_scale"_a, "v_scale"_a, "k_type"_a, "v_type"_a)
        .def("embed", [](Plan& p, int out) { Phase f; f.kind = PhaseKind::Embed; f.out = out; return p.add_phase(std::move(f)); }, "out"_a)
        .def("rows", [](Plan& p, const std::string& kind, int in, int in2, int out, nb::object weight, bool outputs) {
            Phase f;
            f.kind = kind == "rms_norm" ? PhaseKind::Norm : kind == "head_norm" ? PhaseKind::HeadNorm : kind == "rope" ? PhaseKind::Rope : kind == "silu_mul" ? PhaseKind::SiluMul : kind == "add" ? PhaseKind::Add : PhaseKind::SelectRows;
            f.in = in, f.in2 = in2, f.out = out, f.width = p.buffer_width(in), f.outputs = outputs;
            if (!weight.is_none()) f.weight = vector_of(nb::cast<Vec<float>>(weight));
            return p.add_phase(std::move(f));
        }, "kind"_a, "in"_a, "in2"_a, "out"_a, "weight"_a.none(), "outputs"_a)
        .def("attention", [](Plan& p, int layer, int q, int k, int v, int out, bool rope, nb::object q_norm, nb::object k_norm) {
            Phase f;
            f.kind = PhaseKind::Attention, f.layer = layer, f.in = q, f.in2 = k, f.in3 = v, f.out = out, f.rope = rope;
            if (!q_norm.is_none()) f.weight = vector_of(nb::cast<Vec<float>>(q_norm));
            if (!k_norm.is_none()) f.weight2 = vector_of(nb::cast<Vec<float>>(k_norm));
            return p.add_phase(std::move(f));
        }, "layer"_a, "q"_a, "k"_a, "v"_a, "out"_a, "rope"_a, "q_norm"_a.none(), "k_norm"_a.none())
        .def("matmul", [](Plan& p, int in, const std::vector<std::shared_ptr<Packed>>& w, const std::vector<nb::object>& bias, const std::vector<int>& out, int residual, nb::object norm, int silu_out, bool outputs) {
            Phase f;
            f.kind = PhaseKind::Matmul, f.in = in, f.outputs = outputs;
            for (size_t i = 0; i < w.size(); ++i) {
                require(w[i]->w.columns == p.buffer_width(in), "matmul: columns of the weight and width of the input differ");
                require(w[i]->w.rows == p.buffer_width(out[i]), "matmul: rows of the weight and width of the output differ");
                f.linears.push_back({w[i], bias[i].is_none() ? nullptr : vector_of(nb::cast<Vec<float>>(bias[i])), out[i], residual});
            }
            if (!norm.is_none()) f.norm = true, f.weight = vector_of(nb::cast<Vec<float>>(norm));
            if (silu_out >= 0) f.silu = true, f.out = silu_out;
            return p.add_phase(std::move(f));
        }, "in"_a, "w"_a, "bias"_a, "out"_a, "residual"_a, "norm"_a.none(), "silu_out"_a, "outputs"_a)
        .def("top_head", [](Plan& p, int in, int vocab) { Phase f; f.kind = PhaseKind::TopHead; f.in = in; f.width = vocab; f.outputs = true; return p.add_phase(std::move(f)); }, "in"_a, "vocab"_a)
        .def("begin", [](Plan& p, Vec<int32_t> ids, Vec<int32_t> positions, Vec<int32_t> slots, Vec<int32_t> starts, Vec<int32_t> lengths, Mat<int32_t> tables, Vec<int32_t> rows, int top_k) {
            require(positions.shape(0) == ids.shape(0) && slots.shape(0) == ids.shape(0) && starts.shape(0) == lengths.shape(0) + 1 && tables.shape(0) == lengths.shape(0), "batch: lengths of the arrays disagree");
            p.begin({ids.data(), positions.data(), slots.data(), starts.data(), lengths.data(), tables.data(), rows.data(), static_cast<int>(ids.shape(0)), static_cast<int>(lengths.shape(0)), static_cast<int>(tables.shape(1)), static_cast<int>(rows.shape(0))}, top_k);
        }, "token_ids"_a.noconvert(), "positions"_a.noconvert(), "slots"_a.noconvert(), "query_starts"_a.noconvert(), "context_lengths"_a.noconvert(),
             "block_tables"_a.noconvert(), "output_rows"_a.noconvert(), "top_k"_a, "The arrays are read until the step is over: no copies.")
        .def("run", &Plan::run, "first"_a, "last"_a, "profile"_a, "store_only"_a = false, nb::call_guard<nb::gil_scoped_release>())
        .def("view", [](Plan& p, int id) {
            const size_t shape[2] = {static_cast<size_t>(p.buffer_rows(id)), static_cast<size_t>(p.buffer_width(id))};
            return Numpy2(p.buffer(id), 2, shape, nb::find(p));
        }, "buffer"_a, "The buffer of the step under way, [rows, width]; valid until the next step.")
        .def("top", [](const Plan& p, int k) {
            const size_t rows = k > 0 ? p.top_ids().size() / k : 0;
            return nb::make_tuple(owned(std::vector<int32_t>(p.top_ids()), {rows, static_cast<size_t>(k)}), owned(std::vector<float>(p.top_values()), {rows, static_cast<size_t>(k)}));
        }, "k"_a)
        .def_prop_ro("head_rows_finished", &Plan::head_rows_finished)
        .def_prop_ro("scratch_bytes", &Plan::scratch_bytes)
        .def("times", [](const Plan& p) {
            std::vector<double> ns;
            for (const Phase& f : p.phases()) ns.push_back(f.ns.empty() ? 0.0 : f.ns[0]);
            return ns;
        }, "Nanoseconds of each phase of the last profiled run.");
}
