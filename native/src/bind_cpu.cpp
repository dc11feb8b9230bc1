// What Python sees of native/src/cpu. Everything a caller could get wrong is checked here, because
// below it an index out of range is a crash. The GIL is released while anything is computed.
#include "bind_cpu.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pdserve/cpu/model.hpp"

namespace nb = nanobind;

namespace {

using pdserve::cpu::Activation;
using pdserve::cpu::Batch;
using pdserve::cpu::Config;
using pdserve::cpu::Experts;
using pdserve::cpu::Gate;
using pdserve::cpu::Kernels;
using pdserve::cpu::LayerConfig;
using pdserve::cpu::Model;
using pdserve::cpu::Type;

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

// Holds on to an object with the buffer protocol for as long as its bytes are in use.
class Held {
 public:
  Held() { view_.obj = nullptr; }
  ~Held() { reset(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  void hold(nb::handle object, bool writable) {
    Py_buffer fresh;
    const int flags = writable ? PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(object.ptr(), &fresh, flags) != 0) throw nb::python_error();
    reset();
    view_ = fresh;
  }
  void reset() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
    view_.obj = nullptr;
  }
  bool held() const { return view_.obj != nullptr; }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

std::size_t count(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

// Tells a Python callable, if there is one, how many layers are done. An exception ends the calls
// and is kept for `raise`, since the team's members must finish their stages.
class Told {
 public:
  explicit Told(nb::handle callable) : callable_(callable) {}

  Model::After after() {
    if (callable_.is_none()) return {};
    return [this](int layers) {
      if (error_) return;
      const nb::gil_scoped_acquire locked;
      try {
        callable_(layers);
      } catch (...) {
        error_ = std::current_exception();
      }
    };
  }
  void raise() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  nb::handle callable_;
  std::exception_ptr error_;
};

class CpuModel {
 public:
  CpuModel(const Config& config, const Kernels& kernels, int threads)
      : model_(config, kernels, threads), ropes_(static_cast<std::size_t>(config.ropes)) {}
  CpuModel(const CpuModel& owner, int threads)
      : model_(owner.model_, threads), ropes_(owner.ropes_.size()) {}

  // Complete, so that nothing is left to be placed. The caller owns it.
  CpuModel* sibling(int threads) {
    require(threads > 0, "every size must be positive");
    nb::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> one(mutex_);
    require(model_.complete(), "some weights were not placed");
    return new CpuModel(*this, threads);
  }

  std::string kernels() const { return model_.kernels().name; }
  std::size_t weight_bytes() const { return model_.weight_bytes(); }
  int sharers() const { return model_.sharers(); }

  void place(const std::string& name, int layer, int at, int rows, nb::handle data) {
    Held part;
    part.hold(data, false);
    nb::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> one(mutex_);
    model_.place(name, layer, at, rows, part.size(), part.data());
  }

  void set_rope(nb::handle table, int which) {
    const std::lock_guard<std::mutex> one(mutex_);
    require(which >= 0 && which < model_.config().ropes, "no layer uses that rotary table");
    Held& rope = ropes_[static_cast<std::size_t>(which)];
    rope.hold(table, false);
    const std::size_t row = static_cast<std::size_t>(model_.config().head_dim) * sizeof(float);
    require(rope.size() % row == 0, "the rotary table must hold head_dim floats per position");
    model_.set_rope(which, reinterpret_cast<const float*>(rope.data()));
    positions_ = static_cast<int>(rope.size() / row);
    for (const Held& other : ropes_)
      if (other.held()) positions_ = std::min(positions_, static_cast<int>(other.size() / row));
  }

  void bind(nb::handle pool, int blocks, int block_size, const std::vector<float>& fp8_scales) {
    const std::lock_guard<std::mutex> one(mutex_);
    require(model_.complete(), "some weights were not placed");
    const Config& c = model_.config();
    require(blocks > 0 && block_size > 0, "a pool has blocks of at least one token");
    const auto scales = static_cast<std::size_t>(2 * c.layers);
    require(fp8_scales.empty() || fp8_scales.size() == scales,
            "FP8 needs a scale for the keys and one for the values of each layer");
    pool_.hold(pool, true);
    const std::size_t block = count(c.layers * 2, c.kv_heads) * count(block_size, c.head_dim) *
                              (fp8_scales.empty() ? pdserve::cpu::item_size(c.type) : 1);
    require(pool_.size() == static_cast<std::size_t>(blocks) * block,
            "the pool's size does not fit its blocks");
    model_.set_pool(pool_.data(), blocks, block_size, fp8_scales);
  }

  void close() {
    const std::lock_guard<std::mutex> one(mutex_);
    pool_.reset();
    for (Held& rope : ropes_) rope.reset();
  }

  void forward(const Ints& tokens, const Ints& positions, const Ints& offsets, const Ints& starts,
               const Ints& tables, const Ints& table_offsets, const Ints& rows, const RowsOut& out,
               nb::handle after) {
    const Batch batch = checked(tokens, positions, offsets, starts, tables, table_offsets, rows);
    require(out.shape(0) == rows.size() &&
                out.shape(1) == static_cast<std::size_t>(model_.config().hidden),
            "the output must be [wanted rows][hidden]");
    Told told(after);
    {
      nb::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> one(mutex_);
      model_.forward(batch, out.data(), told.after());
    }
    told.raise();
  }

  std::vector<std::int32_t> greedy(const Ints& tokens, const Ints& positions, const Ints& offsets,
                                   const Ints& starts, const Ints& tables,
                                   const Ints& table_offsets, const Ints& rows, nb::handle after) {
    const Batch batch = checked(tokens, positions, offsets, starts, tables, table_offsets, rows);
    std::vector<std::int32_t> out(rows.size());
    Told told(after);
    {
      nb::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> one(mutex_);
      model_.greedy(batch, out.data(), told.after());
    }
    told.raise();
    return out;
  }

  void logits(const Rows& hidden, const RowsOut& out) {
    const Config& c = model_.config();
    require(hidden.shape(1) == static_cast<std::size_t>(c.hidden) &&
                out.shape(0) == hidden.shape(0) &&
                out.shape(1) == static_cast<std::size_t>(c.vocab),
            "hidden must be [rows][hidden] and the output [rows][vocab]");
    nb::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> one(mutex_);
    model_.logits(hidden.data(), static_cast<int>(hidden.shape(0)), out.data());
  }

 private:
  Batch checked(const Ints& tokens, const Ints& positions, const Ints& offsets, const Ints& starts,
                const Ints& tables, const Ints& table_offsets, const Ints& rows) const {
    Batch batch;
    batch.tokens = static_cast<int>(tokens.size());
    batch.chunks = static_cast<int>(starts.size());
    batch.wanted = static_cast<int>(rows.size());
    batch.ids = tokens.data();
    batch.positions = positions.data();
    batch.offsets = offsets.data();
    batch.starts = starts.data();
    batch.tables = tables.data();
    batch.table_offsets = table_offsets.data();
    batch.rows = rows.data();
    require(pool_.held() && std::all_of(ropes_.begin(), ropes_.end(),
                                        [](const Held& rope) { return rope.held(); }),
            "the model has no pool or no rotary table");
    require(positions.size() == tokens.size() && offsets.size() == starts.size() + 1 &&
                table_offsets.size() == starts.size() + 1,
            "the batch's arrays do not fit together");
    check(batch, static_cast<int>(tables.size()));
    return batch;
  }

  void check(const Batch& batch, int tables) const {
    require(batch.offsets[0] == 0 && batch.offsets[batch.chunks] == batch.tokens,
            "the chunks do not cover the tokens");
    require(batch.table_offsets[0] == 0 && batch.table_offsets[batch.chunks] == tables,
            "the chunks do not cover the tables");
    // Ascending from 0 to the total, all offsets are in range: what follows reads by them.
    for (int c = 0; c < batch.chunks; ++c)
      require(batch.offsets[c] < batch.offsets[c + 1] &&
                  batch.table_offsets[c] <= batch.table_offsets[c + 1],
              "a chunk is empty, or the offsets do not ascend");
    for (int i = 0; i < batch.tokens; ++i)
      require(batch.ids[i] >= 0 && batch.ids[i] < model_.config().vocab,
              "a token id is not in the vocabulary");
    for (int i = 0; i < tables; ++i)
      require(batch.tables[i] >= 0 && batch.tables[i] < model_.pool_blocks(),
              "a block id is not in the pool");
    for (int i = 0; i < batch.wanted; ++i)
      require(batch.rows[i] > (i ? batch.rows[i - 1] : -1) && batch.rows[i] < batch.tokens,
              "the wanted rows must ascend within the batch");
    for (int c = 0; c < batch.chunks; ++c) check_chunk(batch, c);
  }

  void check_chunk(const Batch& batch, int chunk) const {
    const int begin = batch.offsets[chunk], end = batch.offsets[chunk + 1];
    const int start = batch.starts[chunk];
    require(start >= 0 && start <= positions_ - (end - begin),
            "a chunk lies outside the rotary table");
    for (int t = begin; t < end; ++t)
      require(batch.positions[t] == start + t - begin, "a chunk's positions do not follow its start");
    const int blocks = batch.table_offsets[chunk + 1] - batch.table_offsets[chunk];
    require(count(blocks, model_.block_size()) >= static_cast<std::size_t>(start + end - begin),
            "a chunk's table is too short");
  }

  Model model_;
  std::mutex mutex_;  // one call at a time, whatever threads Python has
  Held pool_;
  std::vector<Held> ropes_;
  int positions_ = 0;
};

const Kernels& kernels_named(const std::string& name) {
  const Kernels* found =
      name.empty() ? pdserve::cpu::best_kernels() : pdserve::cpu::find_kernels(name.c_str());
  require(found != nullptr, "this machine has no such kernels");
  return *found;
}

std::vector<std::string> cpu_kernel_sets() {
  std::vector<std::string> names;
  for (const char* name : {"avx512_bf16", "avx512", "avx2", "portable"})
    if (pdserve::cpu::find_kernels(name) != nullptr) names.emplace_back(name);
  return names;
}

Gate gate_named(const std::string& name, float alpha, float limit) {
  Gate gate;
  gate.alpha = alpha;
  gate.limit = limit;
  if (name == "gelu") gate.activation = Activation::kGelu;
  if (name == "swiglu") gate.activation = Activation::kSwiglu;
  require(name == "silu" || name == "gelu" || name == "swiglu", "no such activation");
  return gate;
}

Experts experts_of(int count, int per_token, int inner, bool normalized) {
  require(count >= 0 && inner >= 0 && inner % 2 == 0 && per_token <= count &&
              (count == 0 || (per_token > 0 && inner > 0)),
          "experts must be at least as many as one token uses, with an even inner size");
  return {count, per_token, inner, normalized};
}

// The three lists are empty or have one entry for each layer.
std::vector<LayerConfig> each_layer(int layers, const std::vector<int>& windows,
                                    const std::vector<int>& ropes,
                                    const std::vector<bool>& sparse) {
  const auto size = static_cast<std::size_t>(layers);
  for (const std::size_t given : {windows.size(), ropes.size(), sparse.size()})
    require(given == 0 || given == size, "windows, ropes and sparse must name every layer or none");
  std::vector<LayerConfig> each(size);
  for (std::size_t i = 0; i < size; ++i) {
    if (!windows.empty()) each[i].window = windows[i];
    if (!ropes.empty()) each[i].rope = ropes[i];
    if (!sparse.empty()) each[i].sparse = sparse[i];
    require(each[i].window >= 0 && each[i].rope >= 0 && each[i].rope < layers,
            "a window or the number of a rotary table is out of range");
  }
  return each;
}

void construct(CpuModel* self, bool bfloat16, int layers, int hidden, int inner, int heads,
               int kv_heads, int head_dim, int vocab, float epsilon, bool tied, int threads,
               const std::string& kernels, const std::vector<int>& windows,
               const std::vector<int>& ropes, const std::vector<bool>& sparse, int experts,
               int experts_per_token, int experts_inner, bool experts_normalized,
               const std::string& activation, float alpha, float limit, bool out_norms,
               float embed_scale, float query_scale, float softcap, float logits_softcap,
               bool in_norms, bool layer_norms, bool whole_qk_norm, bool parallel,
               float residual_scale, float logit_scale, float query_beta, int query_span) {
  for (const int size :
       {layers, hidden, inner, heads, kv_heads, head_dim, vocab, threads, query_span})
    require(size > 0, "every size must be positive");
  require(heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  require(hidden % 2 == 0 && inner % 2 == 0 && head_dim % 2 == 0,
          "hidden, inner and head_dim must be even");
  require(head_dim <= pdserve::cpu::kMaxHeadDim, "head_dim must be at most 512");
  Config config;
  config.type = bfloat16 ? Type::kBfloat16 : Type::kFloat32;
  config.layers = layers;
  config.hidden = hidden;
  config.inner = inner;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.vocab = vocab;
  config.epsilon = epsilon;
  config.tied = tied;
  config.out_norms = out_norms;
  config.embed_scale = embed_scale;
  config.query_scale =
      query_scale != 0.0f ? query_scale : 1.0f / std::sqrt(static_cast<float>(head_dim));
  config.query_beta = query_beta;
  config.query_span = query_span;
  config.in_norms = in_norms;
  config.layer_norms = layer_norms;
  config.whole_qk_norm = whole_qk_norm;
  config.parallel = parallel;
  config.residual_scale = residual_scale;
  config.logit_scale = logit_scale;
  config.softcap = softcap;
  config.logits_softcap = logits_softcap;
  config.gate = gate_named(activation, alpha, limit);
  config.experts = experts_of(experts, experts_per_token, experts_inner, experts_normalized);
  config.each = each_layer(layers, windows, ropes, sparse);
  for (const LayerConfig& layer : config.each) {
    config.ropes = std::max(config.ropes, layer.rope + 1);
    require(!layer.sparse || experts > 0, "a layer has experts and the model has none");
  }
  new (self) CpuModel(config, kernels_named(kernels), threads);
}

}  // namespace

void bind_cpu(nb::module_& m) {
  m.def("cpu_kernel_sets", &cpu_kernel_sets,
        "Instruction sets that were built and that this machine runs, best first.");
  nb::class_<CpuModel>(m, "CpuModel", "Forward passes of a decoder on the CPU.")
      .def("__init__", &construct, nb::kw_only(), nb::arg("bfloat16"), nb::arg("layers"),
           nb::arg("hidden"), nb::arg("inner"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("vocab"), nb::arg("epsilon"), nb::arg("tied"),
           nb::arg("threads"), nb::arg("kernels") = "",
           nb::arg("windows") = std::vector<int>(), nb::arg("ropes") = std::vector<int>(),
           nb::arg("sparse") = std::vector<bool>(), nb::arg("experts") = 0,
           nb::arg("experts_per_token") = 0, nb::arg("experts_inner") = 0,
           nb::arg("experts_normalized") = false, nb::arg("activation") = "silu",
           nb::arg("alpha") = 1.0f, nb::arg("limit") = 0.0f, nb::arg("out_norms") = false,
           nb::arg("embed_scale") = 1.0f, nb::arg("query_scale") = 0.0f, nb::arg("softcap") = 0.0f,
           nb::arg("logits_softcap") = 0.0f, nb::arg("in_norms") = true,
           nb::arg("layer_norms") = false, nb::arg("whole_qk_norm") = false,
           nb::arg("parallel") = false, nb::arg("residual_scale") = 1.0f,
           nb::arg("logit_scale") = 1.0f, nb::arg("query_beta") = 0.0f, nb::arg("query_span") = 1)
      .def_prop_ro("kernels", &CpuModel::kernels)
      .def_prop_ro("weight_bytes", &CpuModel::weight_bytes)
      .def_prop_ro("sharers", &CpuModel::sharers)
      .def("place", &CpuModel::place, nb::arg("name"), nb::arg("layer"), nb::arg("at"),
           nb::arg("rows"), nb::arg("data"))
      .def("set_rope", &CpuModel::set_rope, nb::arg("table"), nb::arg("which") = 0)
      .def("bind", &CpuModel::bind, nb::arg("pool"), nb::arg("blocks"), nb::arg("block_size"),
           nb::arg("fp8_scales") = std::vector<float>())
      .def("sibling", &CpuModel::sibling, nb::arg("threads"), nb::rv_policy::take_ownership,
           "A model with the same weights, which it shares, and nothing else in common.")
      .def("close", &CpuModel::close)
      .def("forward", &CpuModel::forward, nb::arg("tokens"), nb::arg("positions"),
           nb::arg("offsets"), nb::arg("starts"), nb::arg("tables"), nb::arg("table_offsets"),
           nb::arg("rows"), nb::arg("out"), nb::arg("after") = nb::none())
      .def("greedy", &CpuModel::greedy, nb::arg("tokens"), nb::arg("positions"),
           nb::arg("offsets"), nb::arg("starts"), nb::arg("tables"), nb::arg("table_offsets"),
           nb::arg("rows"), nb::arg("after") = nb::none())
      .def("logits", &CpuModel::logits, nb::arg("hidden"), nb::arg("out"));
}
