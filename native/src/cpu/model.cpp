#include "pdserve/cpu/model.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "pdserve/cpu/fp8.hpp"
#include "pieces.hpp"

namespace pdserve::cpu {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

// ------------------------------------------------------------------ memory

Pages::Pages(std::size_t bytes) {
  if (bytes == 0) return;
  size_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* found = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) {
    size_ = 0;
    throw std::bad_alloc();
  }
  data_ = static_cast<std::uint8_t*>(found);
#if defined(MADV_HUGEPAGE)
  madvise(found, size_, MADV_HUGEPAGE);  // a wish; without it only the address lookups are slower
#endif
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, size_);
}

// ------------------------------------------------------------------ weights

Model::Model(const Config& config, const Kernels& kernels, int threads)
    : Model(config, kernels, threads, std::make_shared<Weights>(config.layers)) {}

Model::Model(const Model& owner, int threads)
    : Model(owner.config_, owner.kernels_, threads, owner.weights_) {}

Model::Model(const Config& config, const Kernels& kernels, int threads,
             std::shared_ptr<Weights> weights)
    : config_(config),
      kernels_(kernels),
      team_(threads),
      weights_(std::move(weights)),
      ropes_(static_cast<std::size_t>(config.ropes)),
      ends_(static_cast<std::size_t>(config.experts.count)),
      scratch_floats_(
          (scratch_floats(kernels, config.head_dim, config.heads) + 63) / 64 * 64) {
  scratch_.reserve(scratch_floats_ * static_cast<std::size_t>(team_.size()));
}

Model::Target Model::find(const std::string& name, int layer) {
  const Config& c = config_;
  if (name == "norm") return {nullptr, &weights_->norm, c.hidden};
  if (name == (c.tied ? "embed" : "head")) return {&weights_->head, nullptr, c.vocab, c.hidden};
  if (layer < 0 || layer >= c.layers) throw std::invalid_argument("no such layer");
  Layer& l = weights_->layers[static_cast<std::size_t>(layer)];
  const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const Experts& e = c.experts;
  if (c.each[static_cast<std::size_t>(layer)].sparse) {
    const std::pair<const char*, Target> sparse[] = {
        {"router", {&l.router, nullptr, e.count, c.hidden}},
        {"router_bias", {nullptr, &l.router_bias, e.count}},
        {"experts_gate", {&l.gate, nullptr, e.inner, c.hidden, e.count}},
        {"experts_gate_bias", {nullptr, &l.gate_bias, e.count * e.inner}},
        {"experts_up", {&l.up, nullptr, e.inner, c.hidden, e.count}},
        {"experts_up_bias", {nullptr, &l.up_bias, e.count * e.inner}},
        {"experts_down", {&l.down, nullptr, c.hidden, e.inner, e.count}},
        {"experts_down_bias", {nullptr, &l.down_bias, e.count * c.hidden}},
    };
    for (const auto& [key, target] : sparse)
      if (name == key) return target;
  }
  const std::pair<const char*, Target> known[] = {
      {"attn_norm", {nullptr, &l.attn_norm, c.hidden}},
      {"mlp_norm", {nullptr, &l.mlp_norm, c.hidden}},
      {"q_norm", {nullptr, &l.q_norm, c.whole_qk_norm ? q : c.head_dim}},
      {"k_norm", {nullptr, &l.k_norm, c.whole_qk_norm ? kv : c.head_dim}},
      {"attn_out_norm", {nullptr, &l.attn_out_norm, c.hidden}},
      {"mlp_out_norm", {nullptr, &l.mlp_out_norm, c.hidden}},
      {"sinks", {nullptr, &l.sinks, c.heads}},
      {"qkv", {&l.qkv, nullptr, q + 2 * kv, c.hidden}},
      {"qkv_bias", {nullptr, &l.qkv_bias, q + 2 * kv}},
      {"o", {&l.o, nullptr, c.hidden, q}},
      {"o_bias", {nullptr, &l.o_bias, c.hidden}},
      {"gate", {&l.gate, nullptr, c.inner, c.hidden}},
      {"gate_bias", {nullptr, &l.gate_bias, c.inner}},
      {"up", {&l.up, nullptr, c.inner, c.hidden}},
      {"up_bias", {nullptr, &l.up_bias, c.inner}},
      {"down", {&l.down, nullptr, c.hidden, c.inner}},
      {"down_bias", {nullptr, &l.down_bias, c.hidden}},
  };
  for (const auto& [key, target] : known)
    if (name == key) return target;
  throw std::invalid_argument("no such tensor: " + name);
}

void Model::place(const std::string& name, int layer, int at, int rows, std::size_t bytes,
                  const void* data) {
  if (weights_.use_count() > 1) throw std::invalid_argument("shared weights cannot be placed");
  if (name == "embed" && !config_.tied) return place_embedding(at, rows, bytes, data);
  const Target target = find(name, layer);
  const std::size_t item = target.matrix ? item_size(config_.type) : sizeof(float);
  const int matrix = at < 0 ? 0 : at / target.rows, row = at - matrix * target.rows;
  if (at < 0 || rows < 0 || matrix >= target.count || rows > target.rows - row ||
      bytes != product_of(rows, target.cols) * item)
    throw std::invalid_argument("a part of " + name + " does not fit");
  if (target.matrix != nullptr) return pack(*target.matrix, target, at, rows, data);
  target.vector->resize(static_cast<std::size_t>(target.rows));
  std::memcpy(target.vector->data() + at, data, bytes);
}

void Model::place_embedding(int at, int rows, std::size_t bytes, const void* data) {
  const std::size_t row = static_cast<std::size_t>(config_.hidden) * item_size(config_.type);
  if (at < 0 || rows < 0 || at + rows > config_.vocab ||
      bytes != static_cast<std::size_t>(rows) * row)
    throw std::invalid_argument("a part of embed does not fit");
  if (weights_->embedding.data() == nullptr)
    weights_->embedding = Pages(static_cast<std::size_t>(config_.vocab) * row);
  std::memcpy(weights_->embedding.data() + static_cast<std::size_t>(at) * row, data, bytes);
}

void Model::pack(Matrix& matrix, const Target& target, int at, int rows, const void* data) {
  // Every matrix begins with a panel of its own.
  const int height = (target.rows + kernels_.panel - 1) / kernels_.panel * kernels_.panel;
  if (matrix.pages.data() == nullptr) {
    matrix.packed.rows = target.count > 1 ? target.count * height : target.rows;
    matrix.packed.cols = target.cols;
    const auto panels = static_cast<std::size_t>(matrix.packed.panels(kernels_.panel));
    matrix.pages = Pages(panels * matrix.packed.panel_bytes(kernels_.panel, config_.type));
    matrix.packed.data = matrix.pages.data();
  }
  at += at / target.rows * (height - target.rows);
  const std::size_t row = static_cast<std::size_t>(target.cols) * item_size(config_.type);
  const auto* source = static_cast<const std::uint8_t*>(data);
  // Cut where panels end, so that no two members write to one cache line.
  const int first = at / kernels_.panel;
  const int last = (at + rows + kernels_.panel - 1) / kernels_.panel;
  team_.run([&](int) {
    team_.stage(last - first, 1, [&](int begin, int end) {
      const int from = std::max(at, (first + begin) * kernels_.panel);
      const int to = std::min(at + rows, (first + end) * kernels_.panel);
      kernels_.pack(config_.type, source + static_cast<std::size_t>(from - at) * row, to - from,
                    target.cols, from, matrix.pages.data());
    });
  });
}

std::size_t Model::weight_bytes() const {
  std::size_t total = 0;
  if (weights_->embedding.size())
    total = product_of(config_.vocab, config_.hidden) * item_size(config_.type);
  const auto matrix = [&](const Matrix& m) {
    total += static_cast<std::size_t>(m.packed.panels(kernels_.panel)) *
             m.packed.panel_bytes(kernels_.panel, config_.type);
  };
  const auto vector = [&](const std::vector<float>& v) { total += v.size() * sizeof(float); };
  matrix(weights_->head);
  vector(weights_->norm);
  for (const Layer& l : weights_->layers) {
    for (const Matrix* m : {&l.qkv, &l.o, &l.gate, &l.up, &l.down, &l.router}) matrix(*m);
    for (const auto* v : {&l.attn_norm, &l.mlp_norm, &l.attn_out_norm, &l.mlp_out_norm, &l.q_norm,
                          &l.k_norm, &l.sinks, &l.qkv_bias, &l.o_bias, &l.gate_bias, &l.up_bias,
                          &l.down_bias, &l.router_bias})
      vector(*v);
  }
  return total;
}

bool Model::complete() const {
  bool all = weights_->head.packed.data != nullptr && !weights_->norm.empty() &&
             (config_.tied || weights_->embedding.data() != nullptr);
  for (std::size_t i = 0; i < config_.each.size(); ++i) {
    const Layer& l = weights_->layers[i];
    for (const Matrix* m : {&l.qkv, &l.o, &l.gate, &l.up, &l.down})
      all = all && m->packed.data != nullptr;
    all = all && (!config_.each[i].sparse || l.router.packed.data != nullptr);
    all = all && (!config_.in_norms || !l.attn_norm.empty());
    all = all && (!config_.in_norms || config_.parallel || !l.mlp_norm.empty());
    all = all && (!config_.out_norms || (!l.attn_out_norm.empty() && !l.mlp_out_norm.empty()));
  }
  return all;
}

void Model::set_pool(std::uint8_t* pool, int blocks, int block_size,
                     std::vector<float> fp8_scales) {
  fp8_scales_ = std::move(fp8_scales);
  pool_ = pool;
  pool_blocks_ = blocks;
  block_size_ = block_size;
}

// ------------------------------------------------------------------ one step

void Model::forward(const Batch& batch, float* out, const After& after) {
  prepare(batch);
  team_.run([&](int member) { all_layers(batch, out, after, member); });
}

void Model::logits(const float* hidden, int rows, float* out) {
  operand_.reserve(product_of(rows, config_.hidden) * item_size(config_.type));
  team_.run([&](int member) { head(hidden, rows, out, member); });
}

void Model::greedy(const Batch& batch, std::int32_t* out, const After& after) {
  prepare(batch);
  const int at_once = std::min(batch.wanted, kernels_.max_rows);
  float* hidden = hidden_.reserve(product_of(batch.wanted, config_.hidden));
  float* logits = logits_.reserve(product_of(at_once, config_.vocab));
  team_.run([&](int member) {
    all_layers(batch, hidden, after, member);
    for (int row = 0; row < batch.wanted; row += at_once) {
      const int rows = std::min(at_once, batch.wanted - row);
      head(hidden + product_of(row, config_.hidden), rows, logits, member);
      team_.stage(rows, 1, [&](int i, int) {
        out[row + i] = kernels_.argmax(logits + product_of(i, config_.vocab), config_.vocab);
      });
    }
  });
}

void Model::all_layers(const Batch& batch, float* out, const After& after, int member) {
  embed(batch);
  for (int index = 0; index < config_.layers; ++index) {
    layer_step(batch, index, member);
    if (member == 0 && after) after(index + 1);
  }
  const float* x = stream_.data();
  team_.stage(batch.wanted, grain_of(batch.wanted, team_.size()), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const std::size_t at = product_of(row, config_.hidden);
      norm(x + at, weights_->norm, Type::kFloat32, out + at);
    }
  });
}

void Model::head(const float* hidden, int rows, float* out, int member) {
  const std::size_t item = item_size(config_.type);
  team_.stage(rows, grain_of(rows, team_.size()), [&](int begin, int end) {
    const std::size_t at = product_of(begin, config_.hidden);
    kernels_.convert(hidden + at, (end - begin) * config_.hidden, config_.type,
                     operand_.data() + at * item);
  });
  product(job(weights_->head, {}, operand_.data(), config_.hidden, Output::kStore, out,
              config_.vocab),
          rows, member);
  const float cap = config_.logits_softcap, scale = config_.logit_scale;
  if (cap <= 0.0f && scale == 1.0f) return;
  const int count = config_.vocab, grain = grain_of(count, team_.size());
  for (int row = 0; row < rows; ++row)
    team_.stage(count, grain, [&](int begin, int end) {
      float* x = out + product_of(row, count);
      for (int i = begin; i < end; ++i) {
        x[i] *= scale;
        if (cap > 0.0f) x[i] = cap * std::tanh(x[i] / cap);
      }
    });
}

void Model::prepare(const Batch& batch) {
  const Config& c = config_;
  const std::size_t item = item_size(c.type);
  stream_.reserve(product_of(batch.tokens, c.hidden));
  qkv_.reserve(product_of(batch.tokens, (c.heads + 2 * c.kv_heads) * c.head_dim));
  operand_.reserve(product_of(batch.tokens, c.hidden) * item);
  mixed_.reserve(product_of(batch.tokens, c.heads * c.head_dim) * item);
  inner_.reserve(product_of(batch.tokens, c.inner) * item);
  if (has_branch()) branch_.reserve(product_of(batch.tokens, c.hidden));
  if (c.experts.count) prepare_experts(batch.tokens);
  plan_attention(batch);
}

void Model::plan_attention(const Batch& batch) {
  pieces_.clear();
  last_pieces_.clear();
  const std::int32_t* wanted = batch.rows;
  const std::int32_t* end = batch.rows + batch.wanted;
  for (int chunk = 0; chunk < batch.chunks; ++chunk) {
    const int begin = batch.offsets[chunk], stop = batch.offsets[chunk + 1];
    cut(chunk, begin, stop - begin, pieces_);
    // After the last layer only wanted rows go on, so only they need to look around in it.
    wanted = std::lower_bound(wanted, end, begin);
    if (wanted != end && *wanted < stop) cut(chunk, *wanted, stop - *wanted, last_pieces_);
  }
}

void Model::cut(int chunk, int first, int tokens, std::vector<Piece>& pieces) const {
  const int groups = config_.heads / config_.kv_heads;
  const int most = std::max(1, kAttentionRows / groups);
  while (tokens > 0) {
    const int count = std::min(tokens, most);
    pieces.push_back({chunk, first, count});
    first += count;
    tokens -= count;
  }
}

KvView Model::kv_view(int layer) const {
  KvView view;
  view.type = config_.type;
  view.block_size = block_size_;
  view.head_dim = config_.head_dim;
  if (!fp8_scales_.empty()) {
    view.fp8 = true;
    view.key_scale = fp8_scales_[static_cast<std::size_t>(2 * layer)];
    view.value_scale = fp8_scales_[static_cast<std::size_t>(2 * layer + 1)];
  }
  view.head_stride = static_cast<std::size_t>(block_size_) * view.token_bytes();
  const std::size_t half = static_cast<std::size_t>(config_.kv_heads) * view.head_stride;
  view.block_stride = static_cast<std::size_t>(config_.layers) * 2 * half;
  view.keys = pool_ + static_cast<std::size_t>(layer) * 2 * half;
  view.values = view.keys + half;
  return view;
}

// ------------------------------------------------------------------ stages

void Model::embed(const Batch& batch) {
  float* x = stream_.data();
  const std::size_t row_bytes = static_cast<std::size_t>(config_.hidden) * item_size(config_.type);
  team_.stage(batch.tokens, grain_of(batch.tokens, team_.size()), [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      float* out = x + product_of(t, config_.hidden);
      if (config_.tied)
        kernels_.unpack_row(config_.type, weights_->head.packed, batch.ids[t], out);
      else
        kernels_.widen(
            config_.type,
            weights_->embedding.data() + static_cast<std::size_t>(batch.ids[t]) * row_bytes,
            config_.hidden, out);
      if (config_.embed_scale != 1.0f)
        for (int i = 0; i < config_.hidden; ++i) out[i] *= config_.embed_scale;
    }
  });
}

void Model::normalise(int rows, const std::vector<float>& weight) {
  const std::size_t item = item_size(config_.type);
  const float* x = stream_.data();
  std::uint8_t* out = operand_.data();
  team_.stage(rows, grain_of(rows, team_.size()), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const std::size_t at = product_of(row, config_.hidden);
      if (config_.in_norms)
        norm(x + at, weight, config_.type, out + at * item);
      else
        kernels_.convert(x + at, config_.hidden, config_.type, out + at * item);
    }
  });
}

Linear Model::job(const Matrix& weight, const std::vector<float>& bias, const void* operand,
                  int cols, Output output, void* out, int out_cols) const {
  Linear work;
  work.type = config_.type;
  work.output = output;
  work.gate = config_.gate;
  work.operand = operand;
  work.operand_stride = static_cast<std::size_t>(cols);
  work.weight = weight.packed;
  work.bias = bias.empty() ? nullptr : bias.data();
  work.out = out;
  work.out_stride = static_cast<std::size_t>(out_cols);
  return work;
}

void Model::product(const Linear& work, int rows, int member) {
  float* scratch = scratch_.data() + static_cast<std::size_t>(member) * scratch_floats_;
  const int panels = work.weight.panels(kernels_.panel);
  const int blocks = (rows + kernels_.max_rows - 1) / kernels_.max_rows;
  const int height = blocks ? (rows + blocks - 1) / blocks : 0;
  const int width = grain_of(panels, team_.size());
  const int columns = (panels + width - 1) / width;
  team_.stage(blocks * columns, 1, [&](int begin, int end) {
    for (int piece = begin; piece < end; ++piece) {
      const int row = piece / columns * height, first = piece % columns * width;
      kernels_.linear(work, row, std::min(height, rows - row), first,
                      std::min(first + width, panels), scratch);
    }
  });
}

void Model::store_head(const float* head, const KvView& kv, float scale, std::uint8_t* out) const {
  if (!kv.fp8) return kernels_.convert(head, kv.head_dim, kv.type, out);
  // Rounded to the model's type first, as everywhere else.
  std::uint8_t rounded[kMaxHeadDim * sizeof(float)];
  float x[kMaxHeadDim];
  kernels_.convert(head, kv.head_dim, kv.type, rounded);
  kernels_.widen(kv.type, rounded, kv.head_dim, x);
  for (int i = 0; i < kv.head_dim; ++i) out[i] = to_fp8(x[i] / scale);
}

void Model::turn_and_store(const Batch& batch, int index, const KvView& kv) {
  const Config& c = config_;
  const Layer& layer = weights_->layers[static_cast<std::size_t>(index)];
  const float* rope =
      ropes_[static_cast<std::size_t>(c.each[static_cast<std::size_t>(index)].rope)];
  const int dim = c.head_dim, width = (c.heads + 2 * c.kv_heads) * dim;
  float* qkv = qkv_.data();
  const auto turn = [&](float* head, const std::vector<float>& weight, int position,
                        float factor) {
    if (!weight.empty() && !c.whole_qk_norm) norm(head, weight, Type::kFloat32, head);
    kernels_.rotate(head, rope + product_of(position, dim), dim, factor);
  };
  const auto token = [&](int chunk, int t) {
    const int position = batch.positions[t];
    float* head = qkv + product_of(t, width);
    const auto contexts = static_cast<float>(position / c.query_span);
    const float scale = c.query_scale * (1.0f + c.query_beta * std::log(1.0f + contexts));
    if (c.whole_qk_norm) {
      norm(head, layer.q_norm, Type::kFloat32, head);
      float* keys = head + product_of(c.heads, dim);
      norm(keys, layer.k_norm, Type::kFloat32, keys);
    }
    for (int h = 0; h < c.heads; ++h, head += dim)
      turn(head, layer.q_norm, position, scale);
    const std::int32_t* table = batch.tables + batch.table_offsets[chunk];
    std::size_t at = static_cast<std::size_t>(table[position / block_size_]) * kv.block_stride +
                     static_cast<std::size_t>(position % block_size_) * kv.token_bytes();
    for (int h = 0; h < c.kv_heads; ++h, head += dim, at += kv.head_stride) {
      turn(head, layer.k_norm, position, 1.0f);
      store_head(head, kv, kv.key_scale, kv.keys + at);
      store_head(head + c.kv_heads * dim, kv, kv.value_scale, kv.values + at);
    }
  };
  team_.stage(batch.tokens, grain_of(batch.tokens, team_.size()), [&](int begin, int end) {
    const std::int32_t* offsets = batch.offsets;
    int chunk = static_cast<int>(std::upper_bound(offsets, offsets + batch.chunks + 1, begin) -
                                 offsets) - 1;
    for (int t = begin; t < end; ++t) {
      while (t >= offsets[chunk + 1]) ++chunk;
      token(chunk, t);
    }
  });
}

void Model::attend(const Batch& batch, const std::vector<Piece>& pieces, int index,
                   const KvView& kv, int member) {
  const Config& c = config_;
  const std::vector<float>& sinks = weights_->layers[static_cast<std::size_t>(index)].sinks;
  const int groups = c.heads / c.kv_heads, width = (c.heads + 2 * c.kv_heads) * c.head_dim;
  float* scratch = scratch_.data() + static_cast<std::size_t>(member) * scratch_floats_;
  // Pieces of several tokens take one KV head at a time. Single tokens take as many as leave work
  // for every member.
  const int count = static_cast<int>(pieces.size());
  const int most = std::max(1, c.kv_heads * count / (team_.size() * kShare));
  const int heads = std::min(most, c.kv_heads);
  const int ranges = (c.kv_heads + heads - 1) / heads;
  team_.stage(count * ranges, 1, [&](int begin, int) {
    // From the back: a chunk's last pieces look at most keys, and long work goes first.
    const Piece& piece = pieces[static_cast<std::size_t>(count - 1 - begin / ranges)];
    Attention work;
    work.kv = &kv;
    work.table = batch.tables + batch.table_offsets[piece.chunk];
    work.groups = groups;
    work.position = batch.positions[piece.first];
    work.tokens = piece.tokens;
    work.written = batch.starts[piece.chunk] + batch.offsets[piece.chunk + 1] -
                   batch.offsets[piece.chunk];
    work.window = c.each[static_cast<std::size_t>(index)].window;
    work.softcap = c.softcap;
    work.query_stride = static_cast<std::size_t>(width);
    work.out_stride = product_of(c.heads, c.head_dim);
    const int first = begin % ranges * heads, last = std::min(first + heads, c.kv_heads);
    const int step = piece.tokens == 1 ? last - first : 1;
    for (work.first_head = first; work.first_head < last; work.first_head += step) {
      work.heads = step;
      const std::size_t head = product_of(work.first_head * groups, c.head_dim);
      work.queries = qkv_.data() + product_of(piece.first, width) + head;
      work.sinks = sinks.empty() ? nullptr : sinks.data() + work.first_head * groups;
      work.out = mixed_.data() + (product_of(piece.first, c.heads * c.head_dim) + head) *
                                     item_size(c.type);
      kernels_.attend(work, scratch);
    }
  });
}

void Model::layer_step(const Batch& batch, int index, int member) {
  const Config& c = config_;
  const Layer& layer = weights_->layers[static_cast<std::size_t>(index)];
  const int q = c.heads * c.head_dim, width = q + 2 * c.kv_heads * c.head_dim;
  const KvView kv = kv_view(index);
  const bool last = index + 1 == c.layers;
  normalise(batch.tokens, layer.attn_norm);
  product(job(layer.qkv, layer.qkv_bias, operand_.data(), c.hidden, Output::kStore, qkv_.data(),
              width),
          batch.tokens, member);
  turn_and_store(batch, index, kv);
  attend(batch, last ? last_pieces_ : pieces_, index, kv, member);
  const int rows = last ? keep_wanted(batch) : batch.tokens;
  product(job(layer.o, layer.o_bias, mixed_.data(), q, branch_output(), branch(), c.hidden), rows,
          member);
  add_branch(rows, layer.attn_out_norm);
  if (!c.parallel) normalise(rows, layer.mlp_norm);
  if (c.each[static_cast<std::size_t>(index)].sparse)
    feed_experts(layer, rows, member);
  else
    feed_forward(layer, rows, member);
  add_branch(rows, layer.mlp_out_norm);
}

// Adds the branch to the stream, in models that normalise or scale it.
void Model::add_branch(int rows, const std::vector<float>& weight) {
  if (!has_branch()) return;
  team_.stage(rows, grain_of(rows, team_.size()), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* x = branch_.data() + product_of(row, config_.hidden);
      float* out = stream_.data() + product_of(row, config_.hidden);
      if (config_.out_norms) norm(x, weight, Type::kFloat32, x);
      for (int i = 0; i < config_.hidden; ++i) out[i] += config_.residual_scale * x[i];
    }
  });
}

// Moves the wanted rows to the front; the others are not read any more.
int Model::keep_wanted(const Batch& batch) {
  if (batch.wanted == batch.tokens) return batch.wanted;
  const std::size_t q = product_of(config_.heads, config_.head_dim) * item_size(config_.type);
  const std::size_t hidden = static_cast<std::size_t>(config_.hidden);
  const std::size_t operand = hidden * item_size(config_.type);
  team_.stage(1, 1, [&](int, int) {
    for (int i = 0; i < batch.wanted; ++i) {
      const auto to = static_cast<std::size_t>(i), from = static_cast<std::size_t>(batch.rows[i]);
      std::memmove(stream_.data() + to * hidden, stream_.data() + from * hidden,
                   hidden * sizeof(float));
      std::memmove(mixed_.data() + to * q, mixed_.data() + from * q, q);
      if (config_.parallel)
        std::memmove(operand_.data() + to * operand, operand_.data() + from * operand, operand);
    }
  });
  return batch.wanted;
}

void Model::feed_forward(const Layer& layer, int rows, int member) {
  const Config& c = config_;
  Linear gate_up = job(layer.gate, layer.gate_bias, operand_.data(), c.hidden, Output::kGated,
                       inner_.data(), c.inner);
  gate_up.second = layer.up.packed;
  gate_up.second_bias = layer.up_bias.empty() ? nullptr : layer.up_bias.data();
  product(gate_up, rows, member);
  product(job(layer.down, layer.down_bias, inner_.data(), c.inner, branch_output(), branch(),
              c.hidden),
          rows, member);
}

}  // namespace pdserve::cpu
