// Python's view: matrices, a pool, a model, one call a step. Arrays are borrowed buffers, kept alive by who uses them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "model.h"
#include "pack.h"
#include "pages.h"
#include "sample.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument(what);
}

// Sizes above this are nobody's model; below it no product of two of them and a few bytes overflows 64 bits.
constexpr int64_t kMostRows = int64_t(1) << 30;
constexpr int64_t kMostHeads = 1 << 16;

Matrix shape_of(Format f, int64_t n, int64_t k) {
  require(n >= 0 && k >= 0 && n <= kMostRows && k <= kMostRows, "n, k: out of range");
  return shape(f, n, k);
}

struct PyMatrix {
  Matrix m;
  ConstBytes owner;
};

Format format_of(int codes, int scales, int zero) {
  require(codes >= 0 && codes <= 6 && scales >= 0 && scales <= 4, "format: unknown codes or scales");
  const Format f{(Codes)codes, (Scales)scales, zero};
  const bool floats = codes <= 2;
  require(floats == (f.scales == Scales::none), "format: float codes have no scales, integer codes need them");
  const Codes c = f.codes;
  bool known = floats;
  if (f.scales == Scales::plain) known = c == Codes::u4 || c == Codes::u5 || c == Codes::s8;
  if (f.scales == Scales::min || f.scales == Scales::kmin) known = c == Codes::u4 || c == Codes::u5;
  if (f.scales == Scales::k16) known = c == Codes::u6;
  require(known, "format: these codes do not go with these scales");
  require(zero == zero_of(f.codes, f.scales), "format: another zero point belongs to it");
  return f;
}

struct PyModel {
  Model model;
  std::vector<nb::object> kept;
  int num_groups = 1, num_ropes = 0;
  std::vector<int> rope_half;
  PyModel(ModelConfig c, const Kernels* k, std::shared_ptr<Pool> p) : model(c, k, std::move(p)) {}
};

template <class T>
T get(const nb::dict& d, const char* key, T fallback) {
  return d.contains(key) ? nb::cast<T>(d[key]) : fallback;
}

const float* floats(PyModel& m, const nb::dict& d, const char* key, int64_t n) {
  if (!d.contains(key) || d[key].is_none()) return nullptr;
  auto a = nb::cast<Floats>(d[key], false);  // a converted copy would not outlive this call
  require((int64_t)a.shape(0) == n, std::string(key) + ": wrong length");
  m.kept.push_back(nb::borrow(d[key]));
  return a.data();
}

Linear linear(PyModel& m, const nb::dict& d, const char* key, int64_t k) {
  Linear l;
  for (nb::handle h : nb::cast<nb::list>(d[key])) {
    const auto& p = nb::cast<const PyMatrix&>(h);
    require(p.m.k == k, std::string(key) + ": wrong number of inputs");
    l.parts.push_back(p.m);
    m.kept.push_back(nb::borrow(h));
  }
  require(!l.parts.empty(), std::string(key) + ": empty");
  return l;
}

std::vector<Matrix> matrices(PyModel& m, const nb::dict& d, const char* key, int64_t n, int64_t k, size_t count) {
  std::vector<Matrix> out;
  for (nb::handle h : nb::cast<nb::list>(d[key])) {
    const auto& p = nb::cast<const PyMatrix&>(h);
    require(p.m.k == k && p.m.n == n, std::string(key) + ": wrong shape");
    out.push_back(p.m);
    m.kept.push_back(nb::borrow(h));
  }
  require(out.size() == count, std::string(key) + ": wrong number of experts");
  return out;
}

void add_layer(PyModel& m, const nb::dict& d) {
  LayerWeights l;
  const int64_t H = m.model.config().hidden;
  l.heads = nb::cast<int>(d["heads"]);
  l.kv_heads = nb::cast<int>(d["kv_heads"]);
  l.head_dim = nb::cast<int>(d["head_dim"]);
  l.value_dim = get(d, "value_dim", l.head_dim);
  require(m.model.kv.empty(), "layers are added before the KV pool is set");
  require(l.heads > 0 && l.kv_heads > 0 && l.heads <= kMostHeads && l.heads % l.kv_heads == 0, "heads: not a multiple of kv_heads");
  require(l.head_dim > 0 && l.head_dim % 16 == 0 && l.value_dim > 0 && l.value_dim % 16 == 0, "head_dim: not a multiple of 16");
  l.window = get<int64_t>(d, "window", 0);
  require(l.window >= 0 && l.window <= INT32_MAX, "window: out of range");
  l.softcap = get(d, "softcap", 0.0f);
  l.scale = nb::cast<float>(d["scale"]);
  l.rope = get(d, "rope", -1);
  l.rope_dim = get(d, "rope_dim", 0);
  l.rope_interleaved = get(d, "rope_interleaved", false);
  require(l.rope < 0 || (l.rope_dim > 0 && l.rope_dim % 2 == 0 && l.rope_dim <= l.head_dim), "rope_dim: out of range");
  l.full_qk_norm = get(d, "full_qk_norm", false);
  l.group = get(d, "group", 0);
  l.slot = get(d, "slot", 0);
  l.qkv = linear(m, d, "qkv", H);
  const int64_t qs = (int64_t)l.heads * l.head_dim, ks = (int64_t)l.kv_heads * l.head_dim, vs = (int64_t)l.kv_heads * l.value_dim;
  require(l.qkv.outputs() == qs + ks + vs, "qkv: wrong number of outputs");
  l.qkv.bias = floats(m, d, "qkv_bias", l.qkv.outputs());
  l.out = linear(m, d, "out", (int64_t)l.heads * l.value_dim);
  require(l.out.outputs() == H, "out: wrong number of outputs");
  l.out.bias = floats(m, d, "out_bias", H);
  l.q_norm = floats(m, d, "q_norm", l.full_qk_norm ? qs : l.head_dim);
  l.k_norm = floats(m, d, "k_norm", l.full_qk_norm ? ks : l.head_dim);
  require(!l.full_qk_norm || (l.q_norm != nullptr && l.k_norm != nullptr), "q_norm: missing");
  l.sinks = floats(m, d, "sinks", l.heads);
  l.attention_norm = floats(m, d, "attention_norm", H);
  l.mlp_norm = floats(m, d, "mlp_norm", H);
  require(l.attention_norm != nullptr && l.mlp_norm != nullptr, "attention_norm, mlp_norm: missing");
  l.post_attention_norm = floats(m, d, "post_attention_norm", H);
  l.post_mlp_norm = floats(m, d, "post_mlp_norm", H);
  if (d.contains("router")) {
    Experts& e = l.experts;
    const auto& router = nb::cast<const PyMatrix&>(d["router"]);
    require(router.m.k == H && !router.m.quantized(), "router: wrong shape or quantized");
    m.kept.push_back(nb::borrow(d["router"]));
    e.router = router.m;
    e.count = (int)router.m.n;
    e.top_k = nb::cast<int>(d["top_k"]);
    require(router.m.n <= kMostHeads, "router: too many experts");
    e.normalize = get(d, "normalize", true);
    require(e.top_k > 0 && e.top_k <= e.count, "top_k: out of range");
    const int64_t I = nb::cast<int64_t>(d["intermediate"]);
    e.gate = matrices(m, d, "expert_gate", I, H, e.count);
    e.up = matrices(m, d, "expert_up", I, H, e.count);
    e.down = matrices(m, d, "expert_down", H, I, e.count);
    const bool codes = e.gate[0].quantized();
    for (const auto* list : {&e.gate, &e.up})
      for (const auto& x : *list) require(x.quantized() == codes, "expert_gate: float and quantized experts are mixed in one layer");
    for (const auto& x : e.down) require(x.quantized() == e.down[0].quantized(), "expert_down: float and quantized experts are mixed in one layer");
  } else {
    l.gate_up = linear(m, d, "gate_up", H);
    require(l.gate_up.parts.size() == 2 && l.gate_up.parts[0].n == l.gate_up.parts[1].n, "gate_up: needs gate and up of one size");
    l.gate_up.bias = floats(m, d, "gate_up_bias", l.gate_up.outputs());
    l.down = linear(m, d, "down", l.gate_up.parts[0].n);
    require(l.down.outputs() == H, "down: wrong number of outputs");
    l.down.bias = floats(m, d, "down_bias", H);
  }
  m.model.layers.push_back(std::move(l));
}

void set_kv(PyModel& m, Bytes pool, int type, int slots, int64_t blocks, int block_tokens, int kv_heads, int head_dim, int value_dim, int groups) {
  require(type >= 0 && type <= 5, "kv type: unknown");
  require(type != 4 || block_tokens % kKeyGroup == 0, "block_tokens: 4-bit keys need a multiple of 32");
  require(block_tokens % 16 == 0 && block_tokens > 0 && block_tokens <= kMostHeads, "block_tokens: not a multiple of 16");
  require(kv_heads > 0 && kv_heads <= kMostHeads && slots > 0 && slots <= kMostHeads && groups > 0 && groups <= kMostHeads, "kv_heads, slots, groups: out of range");
  require(head_dim > 0 && head_dim <= 1024 && value_dim > 0 && value_dim <= 1024, "head_dim: above 1024");
  require(blocks > 0 && blocks <= INT32_MAX, "blocks: out of range");
  KvPool p;
  p.type = (KvType)type;
  p.block_tokens = block_tokens;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.value_dim = value_dim;
  const int64_t each = p.block_bytes();
  require((int64_t)pool.shape(0) % each == 0 && (int64_t)pool.shape(0) / each == blocks * slots, "pool: wrong number of bytes");
  p.block_stride = slots * each;
  for (const auto& l : m.model.layers) {
    require(l.slot >= 0 && l.slot < slots && l.group >= 0 && l.group < groups, "layer: group or slot out of range");
    require(l.kv_heads == kv_heads && l.head_dim == head_dim && l.value_dim == value_dim, "layer: its heads differ from the pool's");
  }
  m.model.kv.clear();
  for (int s = 0; s < slots; s++) {
    p.base = pool.data() + s * each;
    m.model.kv.push_back(p);
  }
  m.model.kv_blocks = blocks;
  m.model.staging = nullptr;
  m.num_groups = groups;
  m.kept.push_back(nb::cast(pool));
}

// Where the keys of unfinished groups of a 4-bit cache are kept, for `slots` sequences.
void set_staging(PyModel& m, Bytes staging, int64_t slots) {
  require(!m.model.kv.empty() && m.model.kv[0].type == KvType::u4, "staging: only a 4-bit KV pool has one");
  const KvPool& p = m.model.kv[0];
  const int64_t each = 4 * (int64_t)p.kv_heads * p.head_dim * kKeyGroup * (int64_t)m.model.layers.size();
  require(slots > 0 && (int64_t)staging.shape(0) % slots == 0 && (int64_t)staging.shape(0) / slots == each, "staging: wrong size");
  require(reinterpret_cast<uintptr_t>(staging.data()) % alignof(float) == 0, "staging: not aligned");
  m.model.staging = reinterpret_cast<float*>(staging.data());
  m.model.staging_slots = slots;
  m.kept.push_back(nb::cast(staging));
}

// Checked here, so that nothing out of range ever reaches the kernels.
void run_step(PyModel& m, Batch& b, Ints tokens, Ints row_start, Ints context, Tables tables, nb::list cos, nb::list sin, Ints outputs, Bytes broken) {
  const auto& c = m.model.config();
  require(!m.model.kv.empty() && m.model.embedding.data != nullptr, "step: no KV pool, or no embedding and head");
  b.rows = tokens.shape(0);
  b.tokens = tokens.data();
  b.sequences = (int64_t)row_start.shape(0) - 1;
  b.row_start = row_start.data();
  b.context = context.data();
  require(b.sequences >= 0 && (int64_t)context.shape(0) == b.sequences, "context: wrong length");
  require(b.sequences == 0 || (b.row_start[0] == 0 && b.row_start[b.sequences] == b.rows), "row_start: must run from 0 to the number of rows");
  require((int)tables.shape(0) == m.num_groups && (int64_t)tables.shape(1) == b.sequences, "tables: wrong shape");
  b.tables = tables.data();
  b.table_width = tables.shape(2);
  const int bt = m.model.kv[0].block_tokens;
  for (int64_t i = 0; i < b.rows; i++) require(b.tokens[i] >= 0 && b.tokens[i] < c.vocab, "tokens: id out of range");
  std::vector<int64_t> window(m.num_groups, -1);
  for (const auto& l : m.model.layers) window[l.group] = std::max<int64_t>(window[l.group], l.window == 0 ? INT64_MAX / 2 : l.window);
  for (int64_t s = 0; s < b.sequences; s++) {
    const int64_t first = b.context[s], n = b.row_start[s + 1] - b.row_start[s];
    require(n > 0 && first >= 0, "row_start: empty or negative range");
    require((first + n + bt - 1) / bt <= b.table_width, "tables: too narrow for a sequence");
    for (int g = 0; g < m.num_groups; g++) {
      const int64_t from = std::max<int64_t>(0, first + 1 - window[g]) / 16 * 16 / bt;
      for (int64_t i = from; i <= (first + n - 1) / bt; i++) {
        const int32_t id = b.tables[(g * b.sequences + s) * b.table_width + i];
        require(id >= 0 && id < m.model.kv_blocks, "tables: block id out of range");
      }
    }
  }
  require(cos.size() == sin.size(), "cos, sin: different lengths");
  std::vector<Rows> hold;
  for (size_t i = 0; i < cos.size(); i++) {
    hold.push_back(nb::cast<Rows>(cos[i]));
    hold.push_back(nb::cast<Rows>(sin[i]));
    for (int j = 0; j < 2; j++) require((int64_t)hold[2 * i + j].shape(0) == b.rows && hold[2 * i + j].shape(1) == hold[2 * i].shape(1), "cos, sin: wrong shape");
    b.cos.push_back(hold[2 * i].data());
    b.sin.push_back(hold[2 * i + 1].data());
  }
  for (const auto& l : m.model.layers) require(l.rope < (int)cos.size() && (l.rope < 0 || (int)hold[2 * l.rope].shape(1) * 2 == l.rope_dim), "cos: table missing or of the wrong width");
  b.output_rows = outputs.data();
  b.outputs = outputs.shape(0);
  require(b.outputs <= b.rows, "outputs: more than rows");
  for (int64_t i = 0; i < b.outputs; i++) require(b.output_rows[i] >= 0 && b.output_rows[i] < b.rows, "outputs: row out of range");
  require((int64_t)broken.shape(0) == b.sequences, "broken: wrong length");
  b.broken = broken.data();
  nb::gil_scoped_release release;
  m.model.step(b);
}

void step(PyModel& m, Ints tokens, Ints row_start, Ints context, Tables tables, nb::list cos, nb::list sin, Ints outputs, Bytes broken) {
  require(m.model.kv.empty() || m.model.kv[0].type != KvType::u4, "step: a 4-bit KV pool needs slots and restored");
  Batch b;
  run_step(m, b, tokens, row_start, context, tables, cos, sin, outputs, broken);
}

// The step of a 4-bit cache. `slots` [sequences], no slot twice; `restored` [groups * sequences].
void step_grouped(PyModel& m, Ints tokens, Ints row_start, Ints context, Tables tables, nb::list cos, nb::list sin, Ints outputs, Bytes broken, Ints slots, Bytes restored) {
  require(m.model.staging != nullptr && !m.model.kv.empty() && m.model.kv[0].type == KvType::u4, "step: no staging, or not a 4-bit KV pool");
  const int64_t sequences = (int64_t)row_start.shape(0) - 1;
  require((int64_t)slots.shape(0) == sequences, "slots: wrong length");
  require((int64_t)restored.shape(0) == m.num_groups * sequences, "restored: wrong length");
  std::vector<bool> taken(m.model.staging_slots, false);
  for (int64_t s = 0; s < sequences; s++) {
    const int32_t slot = slots.data()[s];
    require(slot >= 0 && slot < m.model.staging_slots && !taken[slot], "slots: out of range, or one twice");
    taken[slot] = true;
  }
  Batch b;
  b.slots = slots.data();
  b.restored = restored.data();
  run_step(m, b, tokens, row_start, context, tables, cos, sin, outputs, broken);
}

template <class T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void sample_rows(Rows logits, Column<const uint8_t> greedy, Column<const uint8_t> untouched, Column<const float> temperature, Column<const int64_t> top_k, Column<const double> top_p,
                 Column<const float> min_p, Column<const double> uniform, Column<int64_t> ids, Column<uint8_t> state, Pool& pool, const std::string& kernels) {
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  for (size_t n : {greedy.shape(0), untouched.shape(0), temperature.shape(0), top_k.shape(0), top_p.shape(0), min_p.shape(0), uniform.shape(0), ids.shape(0), state.shape(0)})
    require((int64_t)n == rows, "sample: columns of different lengths");
  const Kernels* k = select_kernels(kernels.c_str());
  require(k != nullptr, "sample: no such kernels on this machine");
  nb::gil_scoped_release release;
  pool.run(rows, [&](int64_t r, int) {
    const Rule rule{greedy.data()[r] != 0, untouched.data()[r] != 0, temperature.data()[r], top_k.data()[r], top_p.data()[r], min_p.data()[r], uniform.data()[r]};
    ids.data()[r] = choose(*k, logits.data() + r * vocab, vocab, rule, state.data() + r);
  });
}

void logprob_rows(Rows logits, Column<const int64_t> ids, Column<const int64_t> wanted, Column<double> own, Column<int64_t> rank,
                  nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> top_ids, nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu> top_values, Pool& pool) {
  const int64_t rows = logits.shape(0), vocab = logits.shape(1), width = top_ids.shape(1);
  for (size_t n : {ids.shape(0), wanted.shape(0), own.shape(0), rank.shape(0), top_ids.shape(0), top_values.shape(0)}) require((int64_t)n == rows, "logprobs: columns of different lengths");
  require((int64_t)top_values.shape(1) == width, "top_values: wrong shape");
  for (int64_t r = 0; r < rows; r++) require(ids.data()[r] >= 0 && ids.data()[r] < vocab && wanted.data()[r] >= 0 && wanted.data()[r] <= std::min(width, vocab), "logprobs: out of range");
  const Kernels* k = select_kernels("auto");
  nb::gil_scoped_release release;
  pool.run(rows, [&](int64_t r, int) {
    log_probabilities(*k, logits.data() + r * vocab, vocab, ids.data()[r], wanted.data()[r], own.data() + r, rank.data() + r, top_ids.data() + r * width, top_values.data() + r * width);
  });
}

}  // namespace

NB_MODULE(_native, mod) {
  mod.doc() = "Headrace's native CPU backend.";
  // At the end of a process an executor's daemon thread may still hold its model; the system takes that memory back.
  nb::set_leak_warnings(false);
  mod.def("kernels", [] {
    nb::list names;
    for (const Kernels* k : kernel_sets())
      if (k != nullptr && select_kernels(k->name) != nullptr) names.append(k->name);
    return names;
  }, "Names of the kernel sets that can run on this machine, best first.");

  nb::class_<Pool>(mod, "Pool")
      .def(nb::init<int, std::vector<int>>(), nb::arg("threads"), nb::arg("pin") = std::vector<int>{}).def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("pulled", &Pool::pulled, "How often a held-up worker was brought to the caller's core.")
      .def_prop_ro("left", &Pool::left, "How often a worker went away from the caller's core.")
      .def_prop_ro("pushed", &Pool::pushed, "How often a worker that had missed loops was sent away from the caller's core.");

  nb::class_<PyMatrix>(mod, "Matrix")
      .def("__init__", [](PyMatrix* self, ConstBytes data, int codes, int scales, int zero, int64_t n, int64_t k) {
        Matrix m = shape_of(format_of(codes, scales, zero), n, k);
        require(n > 0 && k > 0, "Matrix: empty");
        require(data.shape(0) == m.bytes(), "Matrix: wrong number of bytes");
        m.data = data.data();
        new (self) PyMatrix{m, data};
      }, nb::arg("data").noconvert(), nb::arg("codes"), nb::arg("scales"), nb::arg("zero"), nb::arg("n"), nb::arg("k"))
      .def_prop_ro("n", [](const PyMatrix& m) { return m.m.n; })
      .def_prop_ro("k", [](const PyMatrix& m) { return m.m.k; })
      .def_prop_ro("nbytes", [](const PyMatrix& m) { return m.m.bytes(); })
      .def("dequantize", [](const PyMatrix& m, OutRows out) {
        require((int64_t)out.shape(0) == m.m.n && (int64_t)out.shape(1) == m.m.k, "out: wrong shape");
        for (int64_t i = 0; i < m.m.n; i++)
          for (int64_t j = 0; j < m.m.k; j++) out.data()[i * m.m.k + j] = weight_at(m.m, i, j);
      }, nb::arg("out").noconvert(), "Write the exact values, [n][k].");

  mod.def("packed_bytes", [](int codes, int scales, int64_t n, int64_t k) { return shape_of(format_of(codes, scales, zero_of((Codes)codes, (Scales)scales)), n, k).bytes(); });
  mod.def("natural_format", [](int source) {
    require(source_known(source), "source: unknown type");
    const Format f = natural_format((Source)source);
    return nb::make_tuple((int)f.codes, (int)f.scales, f.zero);
  });
  mod.def("pack", [](ConstBytes src, int source, Bytes out, int codes, int scales, int zero, int64_t n, int64_t k, Pool& pool) {
    require(source_known(source), "source: unknown type");
    const Source s = (Source)source;
    const Matrix m = shape_of(format_of(codes, scales, zero), n, k);
    const bool floats = s == Source::f32 || s == Source::f16 || s == Source::bf16;
    const Format natural = natural_format(s);
    require(floats ? m.format.scales == Scales::none || (m.format.codes == Codes::s8 && m.format.scales == Scales::plain) || (m.format.codes == Codes::u4 && m.format.scales == Scales::min)
                   : natural.codes == m.format.codes && natural.scales == m.format.scales && natural.zero == zero,
            "pack: this source cannot become that format");
    require(floats || k % (s >= Source::q4_k && s <= Source::q6_k ? 256 : 32) == 0, "pack: inputs are not whole blocks");
    require(src.shape(0) == n * source_row_bytes(s, k), "pack: source has the wrong number of bytes");
    require(out.shape(0) == m.bytes(), "pack: target has the wrong number of bytes");
    nb::gil_scoped_release release;
    pack(s, src.data(), m, out.data(), pool);
  }, nb::arg("src").noconvert(), nb::arg("source"), nb::arg("out").noconvert(), nb::arg("codes"), nb::arg("scales"), nb::arg("zero"), nb::arg("n"), nb::arg("k"), nb::arg("pool"));

  mod.def("checksum", [](ConstBytes data, Pool& pool) {
    nb::gil_scoped_release release;
    return checksum(data.data(), data.shape(0), pool);
  }, nb::arg("data").noconvert(), nb::arg("pool"), "A 64-bit digest that tells damaged bytes from whole ones.");

  mod.def("populate", [](Bytes memory, int64_t first, int64_t count) {
    require(first >= 0 && count >= 0 && first <= (int64_t)memory.shape(0) && count <= (int64_t)memory.shape(0) - first, "populate: out of range");
    nb::gil_scoped_release release;
    return populate(memory.data() + first, count);
  }, nb::arg("memory").noconvert(), nb::arg("first"), nb::arg("count"),
     "Give the pages of count bytes their memory, contents unchanged. 0 or an errno; with count 0 only whether the system can.");

  // Addresses and no arrays: taking an array costs more than the norm of a few rows.
  mod.def("rms_norm", [kernels = select_kernels("auto")](uintptr_t x, uintptr_t weight, uintptr_t out, int64_t rows, int64_t n, float eps) {
    for (int64_t r = 0; r < rows; r++) kernels->rms_norm((const float*)x + r * n, (const float*)weight, 0.0f, n, eps, (float*)out + r * n);
  }, nb::arg("x"), nb::arg("weight"), nb::arg("out"), nb::arg("rows"), nb::arg("n"), nb::arg("eps"),
     "out = x / sqrt(mean(x^2) + eps) * weight, by the addresses of contiguous fp32 x [rows][n], weight [n] and out [rows][n], which the caller vouches for.");

  mod.def("rotate_and_store", [](uintptr_t x, uintptr_t factors, uintptr_t out, int64_t rows, int64_t width, int64_t stored_from, uintptr_t pool, uintptr_t slots) {
    for (int64_t r = 0; r < rows; r++) {
      const float* a = (const float*)x + r * width;
      const float* f = (const float*)factors + r * width;
      float* o = (float*)out + r * width;
      for (int64_t i = 0; i < width; i += 2) {
        const float re = a[i] * f[i] - a[i + 1] * f[i + 1], im = a[i] * f[i + 1] + a[i + 1] * f[i];
        o[i] = re;
        o[i + 1] = im;
      }
      const int64_t kept = width - stored_from;
      std::memcpy((float*)pool + ((const int64_t*)slots)[r] * kept, o + stored_from, kept * sizeof(float));
    }
  }, nb::arg("x"), nb::arg("factors"), nb::arg("out"), nb::arg("rows"), nb::arg("width"), nb::arg("stored_from"), nb::arg("pool"), nb::arg("slots"),
     "out = x * factors, as complex numbers, and out[r][stored_from:] into row slots[r] of pool; by addresses as in rms_norm, slots int64.");

  mod.def("gemm", [](const PyMatrix& m, Rows x, OutRows out, const std::string& name, bool exact) {
    const Kernels* k = select_kernels(name.c_str());
    require(k != nullptr, "kernels: not available here");
    const int64_t rows = x.shape(0), groups = m.m.groups;
    require((int64_t)x.shape(1) == m.m.k && (int64_t)out.shape(0) == rows && (int64_t)out.shape(1) == m.m.tiles * kTile, "gemm: wrong shape");
    if (!m.m.quantized() || exact) {
      for (int64_t t = 0; t < m.m.tiles; t++) k->gemm_f(m.m, t, x.data(), m.m.k, rows, out.data() + t * kTile, out.shape(1));
      return;
    }
    std::vector<QGroup> data(rows * groups);
    const QRows q{rows, groups, data.data(), {}};
    for (int64_t r = 0; r < rows; r++) k->quantize(x.data() + r * m.m.k, m.m.k, q.row(r));
    k->gemm_q(m.m, 0, m.m.tiles, q, 0, rows, out.data(), out.shape(1));
  }, nb::arg("matrix"), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("kernels") = "auto", nb::arg("exact") = false,
     "One product, for tests: out[rows][tiles * 16].");

  mod.def("sample", &sample_rows, nb::arg("logits").noconvert(), nb::arg("greedy").noconvert(), nb::arg("untouched").noconvert(), nb::arg("temperature").noconvert(), nb::arg("top_k").noconvert(), nb::arg("top_p").noconvert(), nb::arg("min_p").noconvert(), nb::arg("uniform").noconvert(), nb::arg("ids").noconvert(), nb::arg("state").noconvert(), nb::arg("pool"), nb::arg("kernels") = "auto",
          "Choose one token per row. state: 0 chosen, 1 logits not finite, 2 nothing allowed (every logit is -inf).");
  mod.def("logprobs", &logprob_rows, nb::arg("logits").noconvert(), nb::arg("ids").noconvert(), nb::arg("wanted").noconvert(), nb::arg("own").noconvert(), nb::arg("rank").noconvert(), nb::arg("top_ids").noconvert(), nb::arg("top_values").noconvert(), nb::arg("pool"),
          "Log-probability and rank of ids, and the best alternatives of each row.");

  nb::class_<PyModel>(mod, "Model")
      .def("__init__", [](PyModel* self, nb::dict d, std::shared_ptr<Pool> pool, const std::string& name) {
        const Kernels* k = select_kernels(name.c_str());
        require(k != nullptr, "kernels: not available here");
        ModelConfig c;
        c.hidden = nb::cast<int64_t>(d["hidden"]);
        c.vocab = nb::cast<int64_t>(d["vocab"]);
        require(c.hidden > 0 && c.hidden <= kMostRows && c.vocab > 0 && c.vocab <= kMostRows, "hidden, vocab: out of range");
        c.eps = get(d, "eps", c.eps);
        c.norm_offset = get(d, "norm_offset", 0.0f);
        c.embedding_scale = get(d, "embedding_scale", 1.0f);
        c.residual_scale = get(d, "residual_scale", 1.0f);
        c.logit_scale = get(d, "logit_scale", 1.0f);
        c.logit_softcap = get(d, "logit_softcap", 0.0f);
        const int act = get(d, "activation", 0);
        require(act >= 0 && act <= 4, "activation: unknown");
        c.activation = (Activation)act;
        c.exact_activations = get(d, "exact_activations", false);
        new (self) PyModel(c, k, std::move(pool));
      }, nb::arg("config"), nb::arg("pool"), nb::arg("kernels") = "auto")
      .def("add_layer", &add_layer)
      .def("set_ends", [](PyModel& m, nb::object embedding, nb::object head, Floats norm) {
        const auto &e = nb::cast<const PyMatrix&>(embedding), &h = nb::cast<const PyMatrix&>(head);
        const auto& c = m.model.config();
        require(e.m.n == c.vocab && h.m.n == c.vocab && e.m.k == c.hidden && h.m.k == c.hidden, "embedding, head: wrong shape");
        require((int64_t)norm.shape(0) == c.hidden, "final norm: wrong length");
        m.model.embedding = e.m;
        m.model.head = h.m;
        m.model.final_norm = norm.data();
        for (nb::object o : {embedding, head, nb::cast(norm)}) m.kept.push_back(o);
      })
      .def("set_kv", &set_kv, nb::arg("pool").noconvert(), nb::arg("type"), nb::arg("slots"), nb::arg("blocks"), nb::arg("block_tokens"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("groups"))
      .def("copy_block", [](PyModel& m, int64_t source, int64_t target) {
        require(source >= 0 && target >= 0 && source < m.model.kv_blocks && target < m.model.kv_blocks, "copy_block: out of range");
        m.model.copy_block(source, target);
      })
      .def("step", &step, nb::arg("tokens").noconvert(), nb::arg("row_start").noconvert(), nb::arg("context").noconvert(), nb::arg("tables").noconvert(), nb::arg("cos"), nb::arg("sin"), nb::arg("outputs").noconvert(), nb::arg("broken").noconvert(),
           "Run all layers. broken[sequences] is set to 1 where keys or values are not finite or do not fit the cache's type.")
      .def("step", &step_grouped, nb::arg("tokens").noconvert(), nb::arg("row_start").noconvert(), nb::arg("context").noconvert(), nb::arg("tables").noconvert(), nb::arg("cos"), nb::arg("sin"), nb::arg("outputs").noconvert(), nb::arg("broken").noconvert(),
           nb::arg("slots").noconvert(), nb::arg("restored").noconvert(), "The same over a 4-bit KV pool: each sequence's place in the staging, and whether it must be filled from the pool, per group.")
      .def("set_staging", &set_staging, nb::arg("staging").noconvert(), nb::arg("slots"), "Where a 4-bit KV pool's keys of unfinished groups are kept, fp32 [layers][slots][kv_heads][head_dim][32].")
      .def("logits", [](PyModel& m, int64_t first, OutRows out) {
        const int64_t count = out.shape(0);
        require(first >= 0 && first + count <= m.model.outputs(), "logits: rows out of range");
        require((int64_t)out.shape(1) == m.model.config().vocab, "logits: wrong width");
        if (count == 0) return;
        nb::gil_scoped_release release;
        m.model.logits(first, count, out.data());
      }, nb::arg("first"), nb::arg("out").noconvert(), "Logits of the last step's output rows first, first + 1, ...")
      .def_prop_ro("buffer_bytes", [](const PyModel& m) { return m.model.buffer_bytes(); });
}
