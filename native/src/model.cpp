#include "model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kv4.h"

namespace headrace {
namespace {
constexpr int64_t kRowChunk = 64;     // rows of one GEMM item: enough to reuse a tile's weights, few enough to share out
constexpr int64_t kItemBytes = 24576;  // weights of one GEMM item at few rows: amortizes the hand-out, leaves many items
constexpr int64_t kSerialRows = 4;    // below this, a row operation costs less than waking anyone
constexpr int kAttentionRows = 16;
constexpr int64_t kAheadBytes = 16 << 20;  // more keys and values than this would drive each other out of the caches again
// How much of the next attention's keys and values the MLP's two products have brought near when they are through; that of queries,
// keys and values brings the rest. Roughly by what they multiply, so that no loop is given more lines than it can hide.
constexpr double kAfterGateUp = 0.55, kAfterDown = 0.83;

// Whether something in x[n] is not finite or its magnitude reaches `limit`. Compares bit patterns, which order like values
// and put what is not finite on top; this way the loop becomes vector code.
bool reaches(const float* x, int64_t n, float limit) {
  uint32_t top = 0, bound;
  std::memcpy(&bound, &limit, 4);
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    top = std::max(top, bits & 0x7fffffffu);
  }
  return top >= bound;
}

// Rotate the first `dim` values of a head.
void rotate(float* x, const float* cos, const float* sin, int dim, bool interleaved) {
  const int half = dim / 2;
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    for (int i = 0; i < half; i++) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
  }
}
}  // namespace

QRows Model::QBuffer::view(int64_t rows, int64_t k) {
  QRows q;
  q.rows = rows;
  q.groups = (k + kGroup - 1) / kGroup;
  q.data = fit(data, rows * q.groups);
  return q;
}

bool Model::wants_codes(const Linear& w) const {
  for (const auto& m : w.parts)
    if (wants_codes(m)) return true;
  return false;
}

bool Model::wants_numbers(const Linear& w) const {
  for (const auto& m : w.parts)
    if (!wants_codes(m)) return true;
  return false;
}

void Model::each_row(int64_t rows, const std::function<void(int64_t)>& body) {
  if (rows <= kSerialRows) {
    for (int64_t r = 0; r < rows; r++) body(r);
    return;
  }
  const int64_t step = std::max<int64_t>(1, std::min<int64_t>(16, rows / (4 * pool_->threads())));
  pool_->run((rows + step - 1) / step, [&](int64_t item, int) {
    for (int64_t r = item * step; r < std::min(rows, (item + 1) * step); r++) body(r);
  });
}

void Model::foresee(const Batch& b, const LayerWeights& l) {
  const KvPool& kv = this->kv[l.slot];
  const int32_t* tables = b.tables + (int64_t)l.group * b.sequences * b.table_width;
  pieces_.clear();
  piece_bytes_ = kv.block_bytes();
  for (int64_t s = 0; s < b.sequences; s++) {
    const int64_t end = b.context[s], from = l.window > 0 ? std::max<int64_t>(0, end + 1 - l.window) : 0;
    for (int64_t i = from / kv.block_tokens; i * kv.block_tokens < end; i++)
      pieces_.push_back(kv.base + tables[s * b.table_width + i] * kv.block_stride);
  }
  if ((int64_t)pieces_.size() * piece_bytes_ > kAheadBytes) pieces_.clear();
}

Ahead Model::ahead(Share share, int64_t first, int64_t count, int64_t of) const {
  const int64_t lines = piece_bytes_ / 64;
  if (share.to <= share.from || pieces_.empty() || lines == 0) return {};
  // A thread brings what it will read itself: the first of two threads begins with the first half of any loop's items.
  const double each = (double)pieces_.size() * lines / pool_->threads();
  const double begin = (double)first * pool_->threads() / of, end = (double)(first + count) * pool_->threads() / of, run = std::floor(begin);
  const auto line = [&](double at) { return (int64_t)(each * (run + share.from + (share.to - share.from) * std::min(at - run, 1.0))); };
  const int64_t from = line(begin), to = line(end);
  if (to <= from) return {};
  return {pieces_.data() + from / lines, lines * 64, from % lines * 64, to - from};
}

void Model::tile_rows(const Matrix& m, int64_t tile, int64_t tiles, const float* x, int64_t ldx, const QRows& q, int64_t row0, int64_t rows, float* out, int64_t ldo) const {
  if (wants_codes(m)) return k_->gemm_q(m, tile, tiles, q, row0, rows, out, ldo);
  for (int64_t t = 0; t < tiles; t++) k_->gemm_f(m, tile + t, x + row0 * ldx, ldx, rows, out + t * kTile, ldo);
}

void Model::gemm(const Linear& w, const float* x, int64_t ldx, const QRows& q, int64_t rows, float* out, int64_t ldo, Share share) {
  int64_t tiles = 0, bytes = 0;
  for (const auto& m : w.parts) {
    tiles += m.tiles;
    bytes = std::max<int64_t>(bytes, m.tile_bytes);
  }
  const int64_t chunks = (rows + kRowChunk - 1) / kRowChunk;
  // Several rows take two tiles at a time.
  const int64_t per = std::clamp<int64_t>(kItemBytes / (bytes * std::min<int64_t>(rows, 8)), rows > 1 ? 2 : 1, 16) & (rows > 1 ? ~1 : ~0);
  const int64_t spans = (tiles + per - 1) / per;
  pool_->run(spans * chunks, [&](int64_t item, int) {
    const int64_t row0 = item / spans * kRowChunk, n = std::min(kRowChunk, rows - row0), span = item % spans;
    for (int64_t t = span * per, end = std::min(tiles, t + per), count; t < end; t += count) {
      int64_t tile = t, column = 0;
      const Matrix* m = nullptr;
      for (const auto& part : w.parts) {
        m = &part;
        if (tile < part.tiles) break;
        tile -= part.tiles;
        column += part.n;
      }
      column += tile * kTile;
      const int64_t whole = m->n / kTile - tile;  // the last tile of a matrix may have fewer outputs
      count = std::min(end - t, std::max<int64_t>(whole, 1));
      const int64_t outputs = std::min(count * kTile, m->n - tile * kTile);
      float* target = out + row0 * ldo + column;
      QRows own = q;
      own.ahead = ahead(share, item / spans * tiles + t, count, chunks * tiles);
      if (whole > 0) {
        tile_rows(*m, tile, count, x, ldx, own, row0, n, target, ldo);
      } else {
        float edge[kRowChunk * kTile];
        tile_rows(*m, tile, 1, x, ldx, own, row0, n, edge, kTile);
        for (int64_t r = 0; r < n; r++) std::copy_n(edge + r * kTile, outputs, target + r * ldo);
      }
      if (w.bias != nullptr)
        for (int64_t r = 0; r < n; r++)
          for (int64_t i = 0; i < outputs; i++) target[r * ldo + i] += w.bias[column + i];
    }
  });
}

void Model::embed(const Batch& b) {
  const Matrix& m = embedding;
  const int64_t H = c_.hidden;
  each_row(b.rows, [&](int64_t r) {
    for (int64_t i = 0; i < H; i++) x_[r * H + i] = weight_at(m, b.tokens[r], i) * c_.embedding_scale;
  });
}

void Model::attention(const Batch& b, const LayerWeights& l, bool last, const QRows* codes) {
  const int64_t N = l.qkv.outputs(), O = (int64_t)l.heads * l.value_dim;
  const int64_t q_size = (int64_t)l.heads * l.head_dim, k_size = (int64_t)l.kv_heads * l.head_dim;
  const KvPool& kv = this->kv[l.slot];
  const int32_t* tables = b.tables + (int64_t)l.group * b.sequences * b.table_width;
  const float limit = kv.type == KvType::f16 || kv.type == KvType::u4 ? 65520.0f
                      : kv.type == KvType::s8                         ? 127.0f * 65504.0f
                      : kv.type == KvType::bf16                       ? 3.3961776e38f
                                                                      : std::numeric_limits<float>::infinity();  // e4m3 saturates
  // Rotary embedding and the write of this step's keys and values, row by row; attention reads them after the barrier.
  const auto prepare = [&](int64_t r, int64_t seq) {
    float* row = qkv_.data() + r * N;
    float* k = row + q_size;
    if (l.full_qk_norm) {
      k_->rms_norm(row, l.q_norm, c_.norm_offset, q_size, c_.eps, row);
      k_->rms_norm(k, l.k_norm, c_.norm_offset, k_size, c_.eps, k);
    } else {
      if (l.q_norm != nullptr)
        for (int h = 0; h < l.heads; h++) k_->rms_norm(row + h * l.head_dim, l.q_norm, c_.norm_offset, l.head_dim, c_.eps, row + h * l.head_dim);
      if (l.k_norm != nullptr)
        for (int h = 0; h < l.kv_heads; h++) k_->rms_norm(k + h * l.head_dim, l.k_norm, c_.norm_offset, l.head_dim, c_.eps, k + h * l.head_dim);
    }
    if (l.rope >= 0) {
      const float* cos = b.cos[l.rope] + r * (l.rope_dim / 2);
      const float* sin = b.sin[l.rope] + r * (l.rope_dim / 2);
      for (int h = 0; h < l.heads + l.kv_heads; h++) rotate(row + (int64_t)h * l.head_dim, cos, sin, l.rope_dim, l.rope_interleaved);
    }
    for (int64_t i = 0; i < q_size; i++) row[i] *= l.scale;
    if (reaches(k, N - q_size, limit)) row_broken_[r] = 1;
    const int64_t position = b.context[seq] + (r - b.row_start[seq]);
    const int64_t block = tables[seq * b.table_width + position / kv.block_tokens];
    const int offset = (int)(position % kv.block_tokens);
    if (kv.type == KvType::u4)
      store_values4(kv, block, offset, k + k_size);
    else
      k_->store_kv(kv, block, offset, k, k + k_size);
  };
  std::vector<int32_t>& seq_of = slot_of_;
  fit(seq_of, b.rows);
  for (int64_t s = 0; s < b.sequences; s++)
    for (int64_t r = b.row_start[s]; r < b.row_start[s + 1]; r++) seq_of[r] = (int32_t)s;
  each_row(b.rows, [&](int64_t r) { prepare(r, seq_of[r]); });
  std::vector<int64_t> own_from;
  if (kv.type == KvType::u4) own_from = group_keys(b, l, kv, tables);

  // One item: up to kAttentionRows rows of one sequence, one KV head, one segment of the context.
  struct Part {
    int64_t sequence, row, rows, first_segment, segments, partial;  // partial: offset of the rows' partials, -1 if one segment
  };
  std::vector<Part> parts;
  std::vector<std::pair<int32_t, int32_t>> items;  // (part, segment)
  // Whoever comes after the last layer looks at output rows alone.
  std::vector<uint8_t> wanted(b.rows, !last);
  for (int64_t i = 0; last && i < b.outputs; i++) wanted[b.output_rows[i]] = 1;
  const int64_t width = l.value_dim + 2 + 14;  // partials stay aligned to 64 bytes
  int64_t partials = 0;
  for (int64_t s = 0; s < b.sequences; s++)
    for (int64_t r = b.row_start[s]; r < b.row_start[s + 1]; r += kAttentionRows) {
      Part p{s, r, std::min<int64_t>(kAttentionRows, b.row_start[s + 1] - r), 0, 0, -1};
      if (std::find(wanted.begin() + r, wanted.begin() + r + p.rows, 1) == wanted.begin() + r + p.rows) continue;
      const int64_t first = b.context[s] + (r - b.row_start[s]), last = first + p.rows - 1;
      p.first_segment = l.window > 0 ? std::max<int64_t>(0, first + 1 - l.window) / kSegment : 0;
      p.segments = last / kSegment - p.first_segment + 1;
      if (p.segments > 1) {
        p.partial = partials;
        partials += p.segments * p.rows * l.heads * width;
      }
      for (int64_t g = 0; g < p.segments; g++) items.emplace_back((int32_t)parts.size(), (int32_t)(p.first_segment + g));
      parts.push_back(p);
    }
  fit(partial_, partials);
  fit(scratch_, kAttentionScratch * pool_->threads());
  const int group = l.heads / l.kv_heads;
  pool_->run((int64_t)items.size() * l.kv_heads, [&](int64_t item, int thread) {
    const auto [at, segment] = items[item / l.kv_heads];
    const Part& p = parts[at];
    AttentionItem a;
    a.head = (int)(item % l.kv_heads);
    a.group = group;
    a.q = qkv_.data() + p.row * N + (int64_t)a.head * group * l.head_dim;
    a.q_stride = N;
    a.out = att_.data() + p.row * O + (int64_t)a.head * group * l.value_dim;
    a.out_stride = O;
    a.rows = (int)p.rows;
    a.first_position = b.context[p.sequence] + (p.row - b.row_start[p.sequence]);
    a.window = l.window;
    a.softcap = l.softcap;
    a.sinks = l.sinks == nullptr ? nullptr : l.sinks + a.head * group;
    a.table = tables + p.sequence * b.table_width;
    if (kv.type == KvType::u4) {
      a.own_stride = k_size * kKeyGroup;
      a.own_first = b.context[p.sequence] / kKeyGroup;
      a.own_keys = own_.data() + own_from[p.sequence] * a.own_stride + (int64_t)a.head * l.head_dim * kKeyGroup;
    }
    a.from = segment * kSegment;
    a.to = a.from + kSegment;
    if (p.partial >= 0) {
      a.partial_stride = p.segments * width;
      a.partial = partial_.data() + p.partial + (int64_t)a.head * p.rows * group * a.partial_stride + (segment - p.first_segment) * width;
    }
    k_->attention(kv, a, scratch_.data() + thread * kAttentionScratch);
    if (codes == nullptr || p.partial >= 0) return;
    for (int64_t r = 0; r < p.rows; r++) quantize_heads(p.row + r, a.head, l, *codes);
  });
  if (partials == 0) return;
  pool_->run((int64_t)parts.size() * l.kv_heads, [&](int64_t item, int) {
    const Part& p = parts[item / l.kv_heads];
    if (p.partial < 0) return;
    const int64_t head = item % l.kv_heads;
    for (int64_t pair = 0; pair < p.rows * group; pair++) {
      const int64_t h = head * group + pair % group;
      k_->merge_segments(partial_.data() + p.partial + (head * p.rows * group + pair) * p.segments * width, width, p.segments, l.value_dim,
                         l.sinks == nullptr ? nullptr : l.sinks + h, att_.data() + (p.row + pair / group) * O + h * l.value_dim);
      if (codes != nullptr && pair % group == group - 1) quantize_heads(p.row + pair / group, head, l, *codes);
    }
  });
}

// Of what attention made of a row: the heads that share KV head `head`. They fill whole groups.
void Model::quantize_heads(int64_t row, int64_t head, const LayerWeights& l, const QRows& codes) const {
  const int64_t size = (int64_t)l.heads / l.kv_heads * l.value_dim;
  k_->quantize(att_.data() + row * l.heads * l.value_dim + head * size, size, codes.row(row) + head * size / kGroup);
}

std::vector<int64_t> Model::group_keys(const Batch& b, const LayerWeights& l, const KvPool& kv, const int32_t* tables) {
  struct Item {
    int64_t sequence, group;
    bool last;
  };
  std::vector<Item> items;
  std::vector<int64_t> from(b.sequences), crossed;
  for (int64_t s = 0; s < b.sequences; s++) {
    from[s] = (int64_t)items.size();
    const int64_t first = b.context[s], end = first + b.row_start[s + 1] - b.row_start[s];
    for (int64_t g = first / kKeyGroup; g * kKeyGroup < end; g++) items.push_back({s, g, (g + 1) * kKeyGroup >= end});
    if (first % kKeyGroup != 0 && (int64_t)items.size() - from[s] > 1) crossed.push_back(s);
  }
  const int64_t N = l.qkv.outputs(), q_size = (int64_t)l.heads * l.head_dim, size = (int64_t)l.head_dim * kKeyGroup;
  const int per_block = kv.block_tokens / kKeyGroup;
  float* staged_keys = staging + (&l - layers.data()) * staging_slots * l.kv_heads * size;
  fit(own_, items.size() * l.kv_heads * size);
  pool_->run((int64_t)items.size() * l.kv_heads, [&](int64_t item, int) {
    const Item& i = items[item / l.kv_heads];
    const int head = (int)(item % l.kv_heads);
    const int64_t s = i.sequence, first = b.context[s], end = first + b.row_start[s + 1] - b.row_start[s];
    const int64_t block = tables[s * b.table_width + i.group / per_block];
    float* own = own_.data() + item * size;
    float* staged = staged_keys + ((int64_t)b.slots[s] * l.kv_heads + head) * size;
    const int64_t begin = i.group * kKeyGroup;
    const int known = (int)std::max<int64_t>(0, first - begin);  // tokens of the group that earlier steps computed
    if (known > 0) {
      if (b.restored[l.group * b.sequences + s]) load_group4(kv, block, (int)(i.group % per_block), head, staged);
      for (int d = 0; d < l.head_dim; d++) std::copy_n(staged + d * kKeyGroup, known, own + d * kKeyGroup);
    }
    // A token that is not there yet repeats the last one, which leaves the group's range as it is.
    for (int t = known; t < kKeyGroup; t++) {
      const int64_t position = std::min(begin + t, end - 1);
      const float* k = qkv_.data() + (b.row_start[s] + position - first) * N + q_size + (int64_t)head * l.head_dim;
      for (int d = 0; d < l.head_dim; d++) own[d * kKeyGroup + t] = k[d];
    }
    store_group4(kv, block, (int)(i.group % per_block), head, own);
    if (i.last && (i.group == first / kKeyGroup || first % kKeyGroup == 0)) std::copy_n(own, size, staged);
  });
  // Where a chunk began inside one group and ended in another, what was staged had to be read before it is replaced.
  if (!crossed.empty())
    pool_->run((int64_t)crossed.size() * l.kv_heads, [&](int64_t item, int) {
      const int64_t s = crossed[item / l.kv_heads], head = item % l.kv_heads;
      const int64_t last = (s + 1 < b.sequences ? from[s + 1] : (int64_t)items.size()) - 1;
      std::copy_n(own_.data() + (last * l.kv_heads + head) * size, size, staged_keys + ((int64_t)b.slots[s] * l.kv_heads + head) * size);
    });
  return from;
}

void Model::mlp(const LayerWeights& l, int64_t rows) {
  const int64_t H = c_.hidden, I = l.down.parts[0].k;
  const Matrix &gate = l.gate_up.parts[0], &up = l.gate_up.parts[1];
  QRows q = qh_.view(rows, H);
  const bool codes = wants_codes(l.down.parts[0]);
  QRows f = qf_.view(codes ? rows : 0, I);
  const bool whole = I % kGroup == 0;  // then the gated product is quantized where it is made, still in cache
  fit(ff_, rows * I);
  const int64_t chunks = (rows + kRowChunk - 1) / kRowChunk;
  const int64_t groups = (I + kGroup - 1) / kGroup;
  pool_->run(groups * chunks, [&](int64_t item, int) {
    const int64_t row0 = item / groups * kRowChunk, n = std::min(kRowChunk, rows - row0), g = item % groups;
    alignas(64) float gate_out[kRowChunk * kGroup], up_out[kRowChunk * kGroup];
    const int64_t width = std::min<int64_t>(kGroup, I - g * kGroup);
    QRows own = q;
    own.ahead = ahead({0, kAfterGateUp}, item, 1, groups * chunks);
    const int64_t tiles = std::min<int64_t>(2, gate.tiles - 2 * g);
    tile_rows(gate, 2 * g, tiles, h_.data(), H, own, row0, n, gate_out, kGroup);
    tile_rows(up, 2 * g, tiles, h_.data(), H, q, row0, n, up_out, kGroup);
    if (l.gate_up.bias != nullptr)
      for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < width; i++) {
          gate_out[r * kGroup + i] += l.gate_up.bias[g * kGroup + i];
          up_out[r * kGroup + i] += l.gate_up.bias[I + g * kGroup + i];
        }
    if (codes && whole) {
      k_->gated(c_.activation, gate_out, up_out, n * kGroup);
      k_->quantize_groups(gate_out, kGroup, n, f.row(row0) + g, f.groups);
      return;
    }
    for (int64_t r = 0; r < n; r++) {
      float* row = gate_out + r * kGroup;
      k_->gated(c_.activation, row, up_out + r * kGroup, width);
      std::copy_n(row, width, ff_.data() + (row0 + r) * I + g * kGroup);
    }
  });
  if (codes && !whole) quantize_rows(ff_.data(), I, I, rows, f, true);
  gemm(l.down, ff_.data(), I, f, rows, tmp_.data(), H, {kAfterGateUp, kAfterDown});
}

void Model::quantize_rows(const float* x, int64_t ld, int64_t k, int64_t rows, QRows& q, bool needed) {
  if (!needed) return;
  each_row(rows, [&](int64_t r) { k_->quantize(x + r * ld, k, q.row(r)); });
}

// Each row goes to its top_k experts. Rows are sorted by expert so that an expert's weights are read once a step; every
// (row, choice) keeps its own place, and a row adds its choices in order of choice: mates change nothing.
void Model::mixture(const LayerWeights& l, int64_t rows) {
  const Experts& e = l.experts;
  const int64_t H = c_.hidden, I = e.down[0].k, K = e.top_k, total = rows * K;
  fit(router_, rows * (e.router.tiles * kTile));
  const int64_t ldr = e.router.tiles * kTile;
  fit(expert_of_, total);
  fit(expert_weight_, total);
  pool_->run(rows, [&](int64_t r, int) {
    float* logits = router_.data() + r * ldr;
    for (int64_t t = 0; t < e.router.tiles; t++) k_->gemm_f(e.router, t, h_.data() + r * H, H, 1, logits + t * kTile, kTile);
    float top = logits[0];
    for (int i = 1; i < e.count; i++) top = std::max(top, logits[i]);
    float sum = 0;
    for (int i = 0; i < e.count; i++) sum += logits[i] = std::exp(logits[i] - top);
    float chosen = 0;
    for (int64_t j = 0; j < K; j++) {
      int best = -1;
      for (int i = 0; i < e.count; i++) {
        bool taken = false;
        for (int64_t p = 0; p < j; p++) taken |= expert_of_[r * K + p] == i;
        if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
      }
      expert_of_[r * K + j] = best;
      expert_weight_[r * K + j] = logits[best] / sum;
      chosen += logits[best] / sum;
    }
    if (e.normalize)
      for (int64_t j = 0; j < K; j++) expert_weight_[r * K + j] /= chosen;
  });
  std::vector<int32_t> start(e.count + 1, 0), place(total), source(total);
  for (int64_t i = 0; i < total; i++) start[expert_of_[i] + 1]++;
  for (int i = 0; i < e.count; i++) start[i + 1] += start[i];
  std::vector<int32_t> cursor(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < total; i++) source[place[i] = cursor[expert_of_[i]]++] = (int32_t)(i / K);

  const bool codes_in = wants_codes(e.gate[0]) || wants_codes(e.up[0]), codes_down = wants_codes(e.down[0]);
  QRows h = qh_.view(rows, H), sorted = qe_.view(codes_in ? total : 0, H), f = qf_.view(codes_down ? total : 0, I);
  fit(ff_, total * I);
  fit(moe_out_, total * H);
  std::vector<float>& gathered = qkv_;  // free by now
  fit(gathered, total * H);
  pool_->run(total, [&](int64_t i, int) {
    const int64_t from = source[i];
    std::copy_n(h_.data() + from * H, H, gathered.data() + i * H);
    if (codes_in) std::copy_n(h.row(from), h.groups, sorted.row(i));
  });
  std::vector<int32_t> active;
  for (int i = 0; i < e.count; i++)
    if (start[i + 1] > start[i]) active.push_back(i);
  const int64_t tiles_in = e.gate[0].tiles, tiles_out = e.down[0].tiles;
  pool_->run((int64_t)active.size() * tiles_in, [&](int64_t item, int) {
    const int x = active[item / tiles_in];
    const int64_t t = item % tiles_in, lanes = std::min<int64_t>(kTile, I - t * kTile);
    float a[kRowChunk * kTile], b[kRowChunk * kTile];
    for (int64_t row0 = start[x]; row0 < start[x + 1]; row0 += kRowChunk) {
      const int64_t n = std::min<int64_t>(kRowChunk, start[x + 1] - row0);
      tile_rows(e.gate[x], t, 1, gathered.data(), H, sorted, row0, n, a, kTile);
      tile_rows(e.up[x], t, 1, gathered.data(), H, sorted, row0, n, b, kTile);
      for (int64_t r = 0; r < n; r++) {
        k_->gated(c_.activation, a + r * kTile, b + r * kTile, lanes);
        std::copy_n(a + r * kTile, lanes, ff_.data() + (row0 + r) * I + t * kTile);
      }
    }
  });
  quantize_rows(ff_.data(), I, I, total, f, codes_down);
  pool_->run((int64_t)active.size() * tiles_out, [&](int64_t item, int) {
    const int x = active[item / tiles_out];
    const int64_t t = item % tiles_out, lanes = std::min<int64_t>(kTile, H - t * kTile);
    float a[kRowChunk * kTile];
    for (int64_t row0 = start[x]; row0 < start[x + 1]; row0 += kRowChunk) {
      const int64_t n = std::min<int64_t>(kRowChunk, start[x + 1] - row0);
      tile_rows(e.down[x], t, 1, ff_.data(), I, f, row0, n, a, kTile);
      for (int64_t r = 0; r < n; r++) std::copy_n(a + r * kTile, lanes, moe_out_.data() + (row0 + r) * H + t * kTile);
    }
  });
  each_row(rows, [&](int64_t r) {
    float* out = tmp_.data() + r * H;
    std::fill_n(out, H, 0.0f);
    for (int64_t j = 0; j < K; j++) {
      const float w = expert_weight_[r * K + j];
      const float* y = moe_out_.data() + (int64_t)place[r * K + j] * H;
      for (int64_t i = 0; i < H; i++) out[i] += w * y[i];
    }
  });
}

void Model::step(const Batch& b) {
  const int64_t H = c_.hidden;
  int64_t qkv = 0, att = 0;
  for (const auto& l : layers) {
    qkv = std::max(qkv, l.qkv.outputs());
    att = std::max<int64_t>(att, (int64_t)l.heads * l.value_dim);
  }
  int64_t rows = b.rows;
  outputs_ = b.outputs;
  fit(row_broken_, rows);
  std::fill_n(row_broken_.data(), rows, 0);
  fit(x_, rows * H);
  fit(h_, rows * H);
  fit(tmp_, rows * H);
  fit(qkv_, rows * qkv);
  fit(att_, rows * att);
  embed(b);
  // x += post_norm(tmp) (unless there is nothing to add yet), then norm(x): as codes if a next product wants them, and in h if one
  // wants numbers. Otherwise the numbers stay where the row's tmp was, which is in cache and free.
  const auto norm = [&](bool add, const float* post, const float* weight, bool codes, bool numbers) {
    QRows q = qh_.view(codes ? rows : 0, H);
    each_row(rows, [&](int64_t r) {
      float *x = x_.data() + r * H, *t = tmp_.data() + r * H, *h = numbers ? h_.data() + r * H : t;
      if (add) {
        if (post != nullptr) k_->rms_norm(t, post, c_.norm_offset, H, c_.eps, t);
        const float scale = c_.residual_scale;
        for (int64_t i = 0; i < H; i++) x[i] += scale * t[i];
      }
      k_->rms_norm(x, weight, c_.norm_offset, H, c_.eps, h);
      if (codes) k_->quantize(h, H, q.row(r));
    });
    return q;
  };
  const float* pending_post = nullptr;
  for (size_t i = 0; i < layers.size(); i++) {
    const LayerWeights& l = layers[i];
    const QRows q = norm(i > 0, pending_post, l.attention_norm, wants_codes(l.qkv), wants_numbers(l.qkv));
    const bool first = i == 0 || layers[i - 1].experts.count > 0;  // no MLP before it has brought anything
    if (first) foresee(b, l);
    gemm(l.qkv, h_.data(), H, q, rows, qkv_.data(), l.qkv.outputs(), {first ? 0 : kAfterDown, 1});
    const int64_t O = (int64_t)l.heads * l.value_dim;
    const bool last = i + 1 == layers.size(), codes = wants_codes(l.out);
    // Rounded where it is made if that is in whole groups; in the last layer, only what is still wanted afterwards.
    const bool at_once = codes && !last && O / l.kv_heads % kGroup == 0;
    QRows a = qa_.view(codes ? rows : 0, O);
    attention(b, l, last, at_once ? &a : nullptr);
    if (last) {  // from here on only rows whose logits are wanted matter
      for (int64_t r = 0; r < b.outputs; r++) {
        std::copy_n(x_.data() + b.output_rows[r] * H, H, h_.data() + r * H);
        std::copy_n(att_.data() + b.output_rows[r] * O, O, qkv_.data() + r * O);
      }
      for (int64_t s = 0; s < b.sequences; s++)
        b.broken[s] = std::find(row_broken_.data() + b.row_start[s], row_broken_.data() + b.row_start[s + 1], 1) != row_broken_.data() + b.row_start[s + 1];
      rows = b.outputs;
      std::copy_n(h_.data(), rows * H, x_.data());
      std::copy_n(qkv_.data(), rows * O, att_.data());
      if (rows == 0) return;
    }
    quantize_rows(att_.data(), O, O, rows, a, codes && !at_once);
    gemm(l.out, att_.data(), O, a, rows, tmp_.data(), H);
    const bool moe = l.experts.count > 0;
    if (moe)
      norm(true, l.post_attention_norm, l.mlp_norm, wants_codes(l.experts.gate[0]) || wants_codes(l.experts.up[0]), true);
    else
      norm(true, l.post_attention_norm, l.mlp_norm, wants_codes(l.gate_up), wants_numbers(l.gate_up));
    pieces_.clear();
    if (moe) {
      mixture(l, rows);
    } else {
      if (i + 1 < layers.size()) foresee(b, layers[i + 1]);
      mlp(l, rows);
    }
    pending_post = l.post_mlp_norm;
  }
  norm(true, pending_post, final_norm, wants_codes(head), !wants_codes(head));
}

// The final hidden states of the last step's output rows [first, first + count) are still in h_ or, as codes, in qh_.
void Model::logits(int64_t first, int64_t count, float* out) {
  Linear last;
  last.parts = {head};
  QRows q = qh_.view(0, c_.hidden);
  q.rows = count;
  q.data += first * q.groups;
  gemm(last, h_.data() + first * c_.hidden, c_.hidden, q, count, out, c_.vocab);
  if (c_.logit_scale != 1.0f || c_.logit_softcap > 0)
    each_row(count, [&](int64_t r) {
      float* y = out + r * c_.vocab;
      for (int64_t i = 0; i < c_.vocab; i++) {
        y[i] *= c_.logit_scale;
        if (c_.logit_softcap > 0) y[i] = c_.logit_softcap * std::tanh(y[i] / c_.logit_softcap);
      }
    });
}

void Model::copy_block(int64_t source, int64_t target) {
  for (auto& p : kv) std::memcpy(p.base + target * p.block_stride, p.base + source * p.block_stride, p.block_bytes());
}

size_t Model::buffer_bytes() const {
  const auto f = [](const auto& v) { return v.capacity() * sizeof(v[0]); };
  size_t n = f(x_) + f(h_) + f(qkv_) + f(att_) + f(tmp_) + f(ff_) + f(router_) + f(moe_out_) + f(scratch_) + f(partial_) + f(own_) + f(pieces_);
  for (const QBuffer* q : {&qh_, &qa_, &qf_, &qe_}) n += f(q->data);
  return n;
}

}  // namespace headrace
