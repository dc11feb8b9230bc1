// The part of `Model` that computes layers with experts: each row goes through the few that its
// router chooses. Only they are read and computed, and no row is ever dropped.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pdserve/cpu/model.hpp"
#include "pieces.hpp"

namespace pdserve::cpu {
namespace {

// The likeliest experts of a row; of equal ones the first.
void choose(const Experts& experts, const float* logits, int* chosen) {
  for (int i = 0; i < experts.per_token; ++i) {
    int best = -1;
    for (int expert = 0; expert < experts.count; ++expert)
      if ((best < 0 || logits[expert] > logits[best]) &&
          std::find(chosen, chosen + i, expert) == chosen + i)
        best = expert;
    chosen[i] = best;
  }
}

// Their weights: softmax over all experts, or over the chosen ones.
void weigh(const Experts& experts, const float* logits, const int* chosen, float* shares) {
  const float largest = logits[chosen[0]];
  float total = 0.0f;
  for (int i = 0; i < experts.per_token; ++i) {
    shares[i] = std::exp(logits[chosen[i]] - largest);
    total += shares[i];
  }
  if (!experts.normalized) {
    total = 0.0f;
    for (int expert = 0; expert < experts.count; ++expert)
      total += std::exp(logits[expert] - largest);
  }
  for (int i = 0; i < experts.per_token; ++i) shares[i] /= total;
}

}  // namespace

void Model::prepare_experts(int tokens) {
  const Experts& e = config_.experts;
  const std::size_t slots = product_of(tokens, e.per_token), item = item_size(config_.type);
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  router_.reserve(product_of(tokens, e.count));
  shares_.reserve(slots);
  chosen_.reserve(slots);
  slots_.reserve(slots);
  sources_.reserve(slots);
  gathered_.reserve(slots * hidden * item);
  inner_.reserve(slots * static_cast<std::size_t>(e.inner) * item);
  fed_.reserve(slots * hidden);
  // The team must not allocate: each expert has one block that is not full.
  blocks_.reserve(static_cast<std::size_t>(e.count) +
                  slots / static_cast<std::size_t>(kernels_.max_rows));
}

// Every row of a block goes through one expert. Which rows share a block depends on the batch; no
// row's result does.
void Model::feed_experts(const Layer& layer, int rows, int member) {
  const Config& c = config_;
  const int inner = c.experts.inner;
  product(job(layer.router, layer.router_bias, operand_.data(), c.hidden, Output::kStore,
              router_.data(), c.experts.count),
          rows, member);
  choose_experts(rows);
  sort_by_expert(rows);
  gather_operands();
  Linear gate_up = job(layer.gate, {}, gathered_.data(), c.hidden, Output::kGated, inner_.data(),
                       inner);
  gate_up.weight.rows = inner;
  gate_up.second = layer.up.packed;
  gate_up.second.rows = inner;
  expert_product(gate_up, layer.gate_bias, layer.up_bias, member);
  Linear down = job(layer.down, {}, inner_.data(), inner, Output::kStore, fed_.data(), c.hidden);
  down.weight.rows = c.hidden;
  expert_product(down, layer.down_bias, {}, member);
  combine_experts(rows);
}

void Model::choose_experts(int rows) {
  const Experts& e = config_.experts;
  team_.stage(rows, grain_of(rows, team_.size()), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const float* logits = router_.data() + product_of(row, e.count);
      int* chosen = chosen_.data() + product_of(row, e.per_token);
      choose(e, logits, chosen);
      weigh(e, logits, chosen, shares_.data() + product_of(row, e.per_token));
    }
  });
}

// Gives each row's choice a slot, so that the slots of one expert follow each other, and cuts the
// slots into blocks.
void Model::sort_by_expert(int rows) {
  const Experts& e = config_.experts;
  team_.stage(1, 1, [&](int, int) {
    const int slots = rows * e.per_token;
    const int* chosen = chosen_.data();
    std::fill(ends_.begin(), ends_.end(), 0);
    for (int i = 0; i < slots; ++i) ++ends_[static_cast<std::size_t>(chosen[i])];
    blocks_.clear();
    int slot = 0;
    for (int expert = 0; expert < e.count; ++expert) {
      int& end = ends_[static_cast<std::size_t>(expert)];
      int left = end;
      end = slot;
      for (int count; left > 0; left -= count, slot += count) {
        count = std::min(left, kernels_.max_rows);
        blocks_.push_back({expert, slot, count});
      }
    }
    for (int i = 0; i < slots; ++i) {
      const int to = ends_[static_cast<std::size_t>(chosen[i])]++;
      slots_.data()[i] = to;
      sources_.data()[to] = i / e.per_token;
    }
  });
}

void Model::gather_operands() {
  const std::size_t bytes = static_cast<std::size_t>(config_.hidden) * item_size(config_.type);
  team_.stage(static_cast<int>(blocks_.size()), 1, [&](int index, int) {
    const Block& block = blocks_[static_cast<std::size_t>(index)];
    for (int slot = block.slot; slot < block.slot + block.rows; ++slot)
      std::memcpy(gathered_.data() + static_cast<std::size_t>(slot) * bytes,
                  operand_.data() + static_cast<std::size_t>(sources_.data()[slot]) * bytes,
                  bytes);
  });
}

// `work` is that of the first expert; each block has its own.
void Model::expert_product(const Linear& work, const std::vector<float>& bias,
                           const std::vector<float>& second_bias, int member) {
  float* scratch = scratch_.data() + static_cast<std::size_t>(member) * scratch_floats_;
  const int rows = work.weight.rows, panels = work.weight.panels(kernels_.panel);
  const std::size_t bytes = static_cast<std::size_t>(panels) *
                            work.weight.panel_bytes(kernels_.panel, config_.type);
  const int blocks = static_cast<int>(blocks_.size());
  const int width = std::min(panels, grain_of(panels * blocks, team_.size()));
  const int columns = (panels + width - 1) / width;
  team_.stage(blocks * columns, 1, [&](int piece, int) {
    const Block& block = blocks_[static_cast<std::size_t>(piece / columns)];
    const auto expert = static_cast<std::size_t>(block.expert);
    const int first = piece % columns * width;
    Linear own = work;
    own.weight.data += expert * bytes;
    if (own.second.data != nullptr) own.second.data += expert * bytes;
    if (!bias.empty()) own.bias = bias.data() + product_of(block.expert, rows);
    if (!second_bias.empty()) own.second_bias = second_bias.data() + product_of(block.expert, rows);
    kernels_.linear(own, block.slot, block.rows, first, std::min(first + width, panels), scratch);
  });
}

// The weighted sum of each row's experts, the likeliest first.
void Model::combine_experts(int rows) {
  const Experts& e = config_.experts;
  const bool add = branch_output() == Output::kAdd;
  team_.stage(rows, grain_of(rows, team_.size()), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const float* shares = shares_.data() + product_of(row, e.per_token);
      const int* slots = slots_.data() + product_of(row, e.per_token);
      float* out = branch() + product_of(row, config_.hidden);
      float* sum = fed_.data() + product_of(slots[0], config_.hidden);
      for (int i = 0; i < config_.hidden; ++i) sum[i] *= shares[0];
      for (int k = 1; k < e.per_token; ++k) {
        const float* fed = fed_.data() + product_of(slots[k], config_.hidden);
        for (int i = 0; i < config_.hidden; ++i) sum[i] += shares[k] * fed[i];
      }
      for (int i = 0; i < config_.hidden; ++i) out[i] = add ? out[i] + sum[i] : sum[i];
    }
  });
}

}  // namespace pdserve::cpu
