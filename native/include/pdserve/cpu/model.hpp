// The forward pass of a decoder on the CPU: one call computes a whole step.
//
// Twin: pdserve_engines/torch/models/torch_model.py. The model owns work space and its share of the packed
// weights; KV blocks and the rotary table belong to the caller. One thread calls it, one call at a
// time; models that share weights may be called by as many threads as there are models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pdserve/cpu/kernels.hpp"
#include "pdserve/cpu/team.hpp"

namespace pdserve::cpu {

// What differs from layer to layer.
struct LayerConfig {
  int window = 0;       // tokens that a query sees; 0: all before it
  int rope = 0;         // which rotary table
  bool sparse = false;  // has experts in place of one feed-forward
};

struct Experts {
  int count = 0;
  int per_token = 0;
  int inner = 0;
  bool normalized = false;  // the weights of a token's experts are scaled to add up to one
};

struct Config {
  Type type = Type::kFloat32;  // of weights, KV and the operands of products
  int layers = 0;
  int hidden = 0;
  int inner = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  float epsilon = 0.0f;
  bool tied = false;
  bool in_norms = true;        // of the inputs of attention and feed-forward
  bool out_norms = false;      // of their outputs
  bool layer_norms = false;    // norms subtract the mean
  bool whole_qk_norm = false;  // one norm over all heads of q, and one over those of k
  bool parallel = false;       // feed-forward has the input of attention
  float residual_scale = 1.0f;  // of the outputs of attention and feed-forward
  float logit_scale = 1.0f;
  float embed_scale = 1.0f;
  float query_scale = 0.0f;     // factor of the attention scores
  float query_beta = 0.0f;      // it grows by query_beta * log(1 + position / query_span)
  int query_span = 1;
  float softcap = 0.0f;         // of the attention scores; 0: none
  float logits_softcap = 0.0f;  // the same for logits
  Gate gate;
  Experts experts;
  int ropes = 1;                  // rotary tables
  std::vector<LayerConfig> each;  // by layer
};

// Zeroed memory in large pages where the system gives them, for what is read through every step.
class Pages {
 public:
  Pages() = default;
  explicit Pages(std::size_t bytes);
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();
  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

// Work space that grows and is never cleared. `T` needs no destructor.
template <class T>
class Space {
 public:
  T* reserve(std::size_t count) {
    if (count * sizeof(T) > pages_.size()) {
      pages_ = Pages();
      pages_ = Pages(count * sizeof(T));
    }
    return reinterpret_cast<T*>(pages_.data());
  }
  T* data() const { return reinterpret_cast<T*>(pages_.data()); }

 private:
  Pages pages_;
};

// One step's tokens, chunk after chunk; see pdserve_engines/torch/models/forward_batch.py for the fields.
struct Batch {
  int tokens = 0;
  int chunks = 0;
  int wanted = 0;
  const std::int32_t* ids = nullptr;
  const std::int32_t* positions = nullptr;
  const std::int32_t* offsets = nullptr;
  const std::int32_t* starts = nullptr;
  const std::int32_t* tables = nullptr;
  const std::int32_t* table_offsets = nullptr;
  const std::int32_t* rows = nullptr;
};

class Model {
 public:
  Model(const Config& config, const Kernels& kernels, int threads);
  // Shares the weights of `owner` and nothing else. They can no longer be placed.
  Model(const Model& owner, int threads);

  const Config& config() const { return config_; }
  const Kernels& kernels() const { return kernels_; }
  std::size_t weight_bytes() const;
  // How many models these weights are shared by, this one included.
  int sharers() const { return static_cast<int>(weights_.use_count()); }
  // Every tensor that a forward pass reads has been placed; biases, head norms and sinks are
  // optional.
  bool complete() const;

  // Rows [at, at + rows) of the named tensor, whose whole shape the configuration fixes: matrices
  // in the model's type, row-major; vectors (norms, biases, sinks) as float. Experts' tensors are
  // stacked; a part of a matrix lies within one expert. Throws std::invalid_argument for an unknown
  // name or a part that does not fit. `layer` is ignored for `embed`, `norm`, `head`.
  // Not once they are shared.
  void place(const std::string& name, int layer, int at, int rows, std::size_t bytes,
             const void* data);

  // [positions][2][head_dim / 2] floats; stays the caller's.
  void set_rope(int which, const float* table) {
    ropes_[static_cast<std::size_t>(which)] = table;
  }
  // [blocks][layers][2][kv_heads][block_size][head_dim]; stays the caller's. `fp8_scales`: those of
  // each layer's keys and values, one after the other, if it holds FP8; else empty.
  void set_pool(std::uint8_t* pool, int blocks, int block_size, std::vector<float> fp8_scales = {});
  int pool_blocks() const { return pool_blocks_; }
  int block_size() const { return block_size_; }

  // Called in the caller's thread while others compute on: the KV of so many layers is written.
  using After = std::function<void(int)>;

  // Writes the KV of every token and [wanted][hidden] floats. The batch must be in range; `after`
  // must not throw and may be empty.
  void forward(const Batch& batch, float* out, const After& after = {});
  // [rows][hidden] floats of `forward` to [rows][vocab].
  void logits(const float* hidden, int rows, float* out);
  // Both, and the likeliest token of each wanted row; -1 where no logit is a number.
  void greedy(const Batch& batch, std::int32_t* out, const After& after = {});

 private:
  struct Matrix {
    Pages pages;
    Packed packed;
  };
  struct Layer {
    Matrix qkv, o;
    Matrix gate, up, down;  // of the feed-forward, or of all experts
    Matrix router;
    std::vector<float> attn_norm, mlp_norm, attn_out_norm, mlp_out_norm, q_norm, k_norm, sinks;
    std::vector<float> qkv_bias, o_bias, gate_bias, up_bias, down_bias, router_bias;
  };
  struct Weights {
    explicit Weights(int layers) : layers(static_cast<std::size_t>(layers)) {}
    std::vector<Layer> layers;
    Pages embedding;  // row-major, only if not tied
    Matrix head;      // the embedding itself if tied
    std::vector<float> norm;
  };
  // Consecutive tokens of one chunk that attend together.
  struct Piece {
    int chunk, first, tokens;
  };
  struct Target {
    Matrix* matrix = nullptr;
    std::vector<float>* vector = nullptr;
    int rows = 0;
    int cols = 1;
    int count = 1;  // matrices of so many rows, one after the other
  };
  // Rows [slot, slot + rows) of a step's assignments, which all chose one expert.
  struct Block {
    int expert, slot, rows;
  };

  Model(const Config& config, const Kernels& kernels, int threads, std::shared_ptr<Weights> weights);
  Target find(const std::string& name, int layer);
  void place_embedding(int at, int rows, std::size_t bytes, const void* data);
  void pack(Matrix& matrix, const Target& target, int at, int rows, const void* data);

  void prepare(const Batch& batch);
  void prepare_experts(int tokens);
  void plan_attention(const Batch& batch);
  void cut(int chunk, int first, int tokens, std::vector<Piece>& pieces) const;
  KvView kv_view(int layer) const;

  // Each is one stage of the team.
  void embed(const Batch& batch);
  void normalise(int rows, const std::vector<float>& weight);
  void product(const Linear& job, int rows, int member);
  void turn_and_store(const Batch& batch, int index, const KvView& kv);
  void store_head(const float* head, const KvView& kv, float scale, std::uint8_t* out) const;
  void attend(const Batch& batch, const std::vector<Piece>& pieces, int index, const KvView& kv,
              int member);
  void add_branch(int rows, const std::vector<float>& weight);
  void choose_experts(int rows);
  void sort_by_expert(int rows);
  void gather_operands();
  void expert_product(const Linear& job, const std::vector<float>& bias,
                      const std::vector<float>& second_bias, int member);
  void combine_experts(int rows);

  void all_layers(const Batch& batch, float* out, const After& after, int member);
  void layer_step(const Batch& batch, int index, int member);
  void head(const float* hidden, int rows, float* out, int member);
  int keep_wanted(const Batch& batch);
  void feed_forward(const Layer& layer, int rows, int member);
  void feed_experts(const Layer& layer, int rows, int member);
  // Products at the end of attention and feed-forward go to the branch if something is left to be
  // done with them, else to the stream.
  bool has_branch() const { return config_.out_norms || config_.residual_scale != 1.0f; }
  Output branch_output() const { return has_branch() ? Output::kStore : Output::kAdd; }
  float* branch() const { return has_branch() ? branch_.data() : stream_.data(); }
  void norm(const float* x, const std::vector<float>& weight, Type type, void* out) const {
    const auto run = config_.layer_norms ? kernels_.layer_norm : kernels_.norm;
    run(x, weight.data(), static_cast<int>(weight.size()), config_.epsilon, type, out);
  }
  Linear job(const Matrix& weight, const std::vector<float>& bias, const void* operand, int cols,
             Output output, void* out, int out_cols) const;

  Config config_;
  const Kernels& kernels_;
  Team team_;
  std::shared_ptr<Weights> weights_;  // written only while this model is the only one
  std::vector<const float*> ropes_;
  std::uint8_t* pool_ = nullptr;
  int pool_blocks_ = 0;
  int block_size_ = 1;
  std::vector<float> fp8_scales_;  // [layers][2]; empty: the pool has the model's type

  std::vector<Piece> pieces_, last_pieces_;
  std::vector<Block> blocks_;
  std::vector<int> ends_;          // [experts] end of each expert's slots
  Space<float> stream_;            // [tokens][hidden], the residual stream
  Space<float> branch_;            // [tokens][hidden], what is normalised or scaled before it is added
  Space<float> qkv_;               // [tokens][heads + 2 kv_heads][head_dim]
  Space<std::uint8_t> operand_;    // [tokens][hidden], normalised
  Space<std::uint8_t> mixed_;      // [tokens][heads][head_dim], out of attention
  Space<std::uint8_t> inner_;      // [tokens][inner], or of each slot
  Space<float> router_;            // [tokens][experts]
  Space<float> shares_;            // [tokens][per token] weights of the experts
  Space<int> chosen_;              // [tokens][per token] experts
  Space<int> slots_;               // [tokens][per token] where the expert's result is
  Space<int> sources_;             // [slots] rows
  Space<std::uint8_t> gathered_;   // [slots][hidden]
  Space<float> fed_;               // [slots][hidden], out of the experts
  Space<float> hidden_;            // [wanted][hidden], of greedy steps
  Space<float> logits_;            // [some rows][vocab], of greedy steps
  Space<float> scratch_;           // one run per member
  std::size_t scratch_floats_ = 0;
};

}  // namespace pdserve::cpu
