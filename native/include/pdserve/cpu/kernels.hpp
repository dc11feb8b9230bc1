// The arithmetic of a transformer's forward pass on one thread, once per instruction set.
//
// Every function computes each output element by one fixed sequence of operations, whatever the
// number of rows it is called with. So a token's result does not depend on which other tokens share
// its step, on how a prompt was cut into chunks, or on where attention found its prefix: scheduling
// cannot change a bit of the output. Keep it that way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve::cpu {

// Storage of weights, of KV and of the left operand of products. Accumulation is always float.
enum class Type : std::uint8_t { kFloat32, kBfloat16 };

inline std::size_t item_size(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// A matrix [rows][cols] packed for reading: panels of `Kernels::panel` rows, each stored column by
// column (bfloat16: by pairs of columns, so `cols` is even), the last one padded with zeros.
struct Packed {
  const std::uint8_t* data = nullptr;
  int rows = 0;
  int cols = 0;

  int panels(int panel) const { return (rows + panel - 1) / panel; }
  std::size_t panel_bytes(int panel, Type type) const {
    return static_cast<std::size_t>(cols) * static_cast<std::size_t>(panel) * item_size(type);
  }
};

enum class Output : std::uint8_t {
  kStore,  // out = product
  kAdd,    // out += product
  kGated,  // out = gate of product and product with `second`, stored in the operand type
};

enum class Activation : std::uint8_t {
  kSilu,    // gate * sigmoid(gate) * up
  kGelu,    // gelu(gate) * up, in its tanh form
  kSwiglu,  // gate * sigmoid(alpha * gate) * (up + 1), gate and up clamped to `limit`
};

struct Gate {
  Activation activation = Activation::kSilu;
  float alpha = 1.0f;  // kSwiglu only, as is `limit`
  float limit = 0.0f;
};

// out[m][rows] = operand[m][cols] . weight^T + bias
struct Linear {
  Type type = Type::kFloat32;
  Output output = Output::kStore;
  Gate gate;  // kGated only
  const void* operand = nullptr;
  std::size_t operand_stride = 0;  // in items
  Packed weight;
  Packed second;
  const float* bias = nullptr;         // of `weight`; may be null
  const float* second_bias = nullptr;  // of `second`; may be null
  void* out = nullptr;                 // float, or the operand type for kGated
  std::size_t out_stride = 0;          // in items
};

// Where one layer's keys and values are: head h of block b begins at
// `keys + b * block_stride + h * head_stride`, then [token][dim].
struct KvView {
  Type type = Type::kFloat32;  // of what is computed with
  bool fp8 = false;            // stored as FP8, which times the scale is the number that is meant
  float key_scale = 1.0f;
  float value_scale = 1.0f;
  std::uint8_t* keys = nullptr;
  std::uint8_t* values = nullptr;
  std::size_t block_stride = 0;  // in bytes
  std::size_t head_stride = 0;   // in bytes
  int block_size = 0;
  int head_dim = 0;

  std::size_t token_bytes() const {
    return static_cast<std::size_t>(head_dim) * (fp8 ? 1 : item_size(type));
  }
};

// Queries of some KV heads' groups, of consecutive tokens of one sequence.
struct Attention {
  const KvView* kv = nullptr;
  const std::int32_t* table = nullptr;  // block ids of the sequence
  int first_head = 0;  // KV heads [first_head, first_head + heads)
  int heads = 0;
  int groups = 0;    // query heads per KV head
  int position = 0;  // of the first token
  int tokens = 0;
  int written = 0;  // tokens of the sequence whose keys and values are stored
  int window = 0;   // tokens a query sees, its own included; 0: all before it
  float softcap = 0.0f;            // scores become softcap * tanh(score / softcap); 0: they do not
  const float* sinks = nullptr;    // as `queries`, one float per query head; may be null
  const float* queries = nullptr;  // first token, first query head; rotated and scaled
  std::size_t query_stride = 0;    // from token to token, in floats
  void* out = nullptr;             // as queries, in the type of the KV
  std::size_t out_stride = 0;      // in items
};

struct Kernels {
  const char* name;
  int panel;     // rows of a packed panel; also the keys attention looks at at a time
  int max_rows;  // rows `linear` works on at a time

  // Packs a row-major matrix [rows][cols] as rows [at, at + rows) of a packed one.
  void (*pack)(Type type, const void* source, int rows, int cols, int at, std::uint8_t* packed);
  // Row `row` of a packed matrix as floats.
  void (*unpack_row)(Type type, const Packed& matrix, int row, float* out);
  // Rows [row, row + rows) of the output, panels [first, last). `scratch`: see scratch_floats.
  void (*linear)(const Linear& job, int row, int rows, int first, int last, float* scratch);
  // RMS norm of one row; `out` in `type`, or in place when it is the same float row.
  void (*norm)(const float* x, const float* weight, int n, float epsilon, Type type, void* out);
  // The same after the mean is subtracted.
  void (*layer_norm)(const float* x, const float* weight, int n, float epsilon, Type type,
                     void* out);
  // Rotary embedding of one head, in place; `table` holds dim / 2 cosines, then as many sines.
  void (*rotate)(float* head, const float* table, int dim, float scale);
  void (*convert)(const float* x, int n, Type type, void* out);
  void (*widen)(Type type, const void* x, int n, float* out);
  void (*attend)(const Attention& job, float* scratch);
  // Index of the first largest of n > 0 floats; NaNs are passed over. -1: nothing is above -inf.
  int (*argmax)(const float* x, int n);
};

// Rows (tokens x query heads) one attention call may have, unless it has one token only.
constexpr int kAttentionRows = 64;
constexpr int kMaxHeadDim = 512;

// Floats of scratch one thread needs for `linear` and `attend`; `heads` counts query heads.
std::size_t scratch_floats(const Kernels& kernels, int head_dim, int heads);

// The best set for this machine; never null.
const Kernels* best_kernels();
// The set of that name if it was built and this machine can run it, else null.
const Kernels* find_kernels(const char* name);

}  // namespace pdserve::cpu
