// A decoder-only transformer as the native backend runs it: one call does a whole step for all rows and layers.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Outputs of several matrices over the same input, side by side (q, k, v; or gate, up).
struct Linear {
  std::vector<Matrix> parts;
  const float* bias = nullptr;  // over all outputs, or null
  int64_t outputs() const {
    int64_t n = 0;
    for (const auto& p : parts) n += p.n;
    return n;
  }
};

struct Experts {
  int count = 0, top_k = 0;
  bool normalize = true;
  Matrix router;  // float format
  std::vector<Matrix> gate, up, down;
};

struct LayerWeights {
  int heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  int64_t window = 0;
  float softcap = 0, scale = 1;
  int rope = -1;         // index of the step's rope table, -1 for none
  int rope_dim = 0;      // rotated dimensions of each head
  bool rope_interleaved = false;
  bool full_qk_norm = false;  // norm over all heads together rather than per head
  int group = 0, slot = 0;  // place in the KV cache
  Linear qkv, out;
  const float *q_norm = nullptr, *k_norm = nullptr, *sinks = nullptr;
  const float *attention_norm = nullptr, *post_attention_norm = nullptr, *mlp_norm = nullptr, *post_mlp_norm = nullptr;
  Linear gate_up, down;
  Experts experts;  // used when count > 0
};

struct ModelConfig {
  int64_t hidden = 0, vocab = 0;
  float eps = 1e-6f, norm_offset = 0, embedding_scale = 1, residual_scale = 1, logit_scale = 1, logit_softcap = 0;
  Activation activation = Activation::silu;
  bool exact_activations = false;
};

// All rows of a step. Row ranges of one sequence are consecutive.
struct Batch {
  int64_t rows = 0;
  const int32_t* tokens = nullptr;  // [rows]
  int64_t sequences = 0;
  const int32_t* row_start = nullptr;   // [sequences + 1]
  const int32_t* context = nullptr;     // [sequences] position of the first row
  const int32_t* tables = nullptr;      // [groups][sequences][table_width] block ids
  int64_t table_width = 0;
  std::vector<const float*> cos, sin;   // per rope table: [rows][rope_dim / 2]
  const int32_t* output_rows = nullptr;  // [outputs]
  int64_t outputs = 0;
  // u4 caches only: each sequence's slot of the staging, and whether its keys of the group that it goes on in must first be
  // staged from the cache, [groups][sequences].
  const int32_t* slots = nullptr;
  const uint8_t* restored = nullptr;
  uint8_t* broken = nullptr;  // [sequences], set to 1 where keys or values are not finite or too large for the cache
};

// A loop's part [from, to) of something that several loops do together.
struct Share {
  double from = 0, to = 0;
};

class Model {
 public:
  Model(ModelConfig config, const Kernels* kernels, std::shared_ptr<Pool> pool) : c_(config), k_(kernels), pool_(std::move(pool)) {}

  ModelConfig& config() { return c_; }
  std::vector<LayerWeights> layers;
  Matrix embedding, head;
  const float* final_norm = nullptr;
  std::vector<KvPool> kv;  // per slot
  int64_t kv_blocks = 0;
  float* staging = nullptr;  // u4 only: [layers][slots][kv_heads][head_dim][kKeyGroup] keys of unfinished groups
  int64_t staging_slots = 0;

  // Runs all layers; the output rows' final hidden states stay here for `logits`, until the next step.
  void step(const Batch& b);
  int64_t outputs() const { return outputs_; }
  void logits(int64_t first, int64_t count, float* out);  // out[count][vocab]
  void copy_block(int64_t source, int64_t target);
  size_t buffer_bytes() const;

 private:
  struct Rows;
  // What earlier tokens left in the cache for a layer's attention, listed for the products before it to bring near.
  void foresee(const Batch& b, const LayerWeights& l);
  // What of it falls to tiles [first, first + count) of a loop that has `of` of them and takes this share.
  Ahead ahead(Share share, int64_t first, int64_t count, int64_t of) const;
  void gemm(const Linear& w, const float* x, int64_t ldx, const QRows& q, int64_t rows, float* out, int64_t ldo, Share share = {});
  void quantize_rows(const float* x, int64_t ld, int64_t k, int64_t rows, QRows& q, bool needed);
  bool wants_codes(const Linear& w) const;    // of one of its matrices at least
  bool wants_numbers(const Linear& w) const;
  bool wants_codes(const Matrix& m) const { return m.quantized() && !c_.exact_activations; }
  void tile_rows(const Matrix& m, int64_t tile, int64_t tiles, const float* x, int64_t ldx, const QRows& q, int64_t row0, int64_t rows, float* out, int64_t ldo) const;
  void embed(const Batch& b);
  // `last`: of output rows only. `codes`: null, or where the result goes as codes too.
  void attention(const Batch& b, const LayerWeights& l, bool last, const QRows* codes);
  void quantize_heads(int64_t row, int64_t head, const LayerWeights& l, const QRows& codes) const;
  // Keys of the groups that the step writes to: gathered in `own_`, coded, and staged. Returns where each sequence's begin.
  std::vector<int64_t> group_keys(const Batch& b, const LayerWeights& l, const KvPool& kv, const int32_t* tables);
  void mlp(const LayerWeights& l, int64_t rows);
  void mixture(const LayerWeights& l, int64_t rows);
  void each_row(int64_t rows, const std::function<void(int64_t)>& body);

  template <class T>
  static T* fit(std::vector<T>& v, size_t n) {
    if (v.size() < n) v.resize(n);
    return v.data();
  }
  struct QBuffer {
    std::vector<QGroup> data;
    QRows view(int64_t rows, int64_t k);
  };

  ModelConfig c_;
  const Kernels* k_;
  std::shared_ptr<Pool> pool_;
  int64_t outputs_ = 0;
  std::vector<float> x_, h_, qkv_, att_, tmp_, ff_, router_, moe_out_, scratch_, partial_, own_;
  std::vector<int32_t> order_, expert_of_, slot_of_;
  std::vector<float> expert_weight_;
  std::vector<uint8_t> row_broken_;
  std::vector<const uint8_t*> pieces_;
  int64_t piece_bytes_ = 0;
  QBuffer qh_, qa_, qf_, qe_;
};

}  // namespace headrace
