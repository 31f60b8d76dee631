// Owns the checks and the parallel loops around the kernels. All loops run on torch's own threads.
#include <ATen/Parallel.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "shim.h"

namespace dh {

namespace {

// Whether the processor rounds to bfloat16 and multiplies tiles of it, and the system lets this process use them.
bool has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kVectorBf16 = 1u << 5;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kVectorBf16)) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Those that run on this processor, the best first.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  bool v4 = __builtin_cpu_supports("x86-64-v4");
  if (v4 && has_amx()) usable.push_back(&kernels_amx());
  if (v4) usable.push_back(&kernels_v4());
  if (__builtin_cpu_supports("x86-64-v3")) usable.push_back(&kernels_v3());
  usable.push_back(&kernels_baseline());
  return usable;
}

}  // namespace

// DRAFTHORSE_KERNELS names others than the best, to compare or to test them.
const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    std::vector<const Kernels*> usable = usable_kernels();
    const char* wanted = std::getenv("DRAFTHORSE_KERNELS");
    for (const Kernels* kernels : usable) {
      if (wanted && std::strcmp(kernels->name, wanted) == 0) return *kernels;
    }
    return *usable.front();
  }();
  return chosen;
}

namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kGrain = 16384;

Element element(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Element::F32;
    case at::kBFloat16: return Element::BF16;
    default: TORCH_CHECK(false, "kernels take float32 and bfloat16, not ", t.scalar_type());
  }
}

void check(const at::Tensor& t, const at::Tensor& like, const char* name) {
  TORCH_CHECK(t.is_cpu() && t.is_contiguous(), name, " must be a contiguous CPU tensor");
  TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, " must be of type ", like.scalar_type());
}

// On a cache line of its own.
float* scratch(size_t floats) {
  // Grows to the largest tile this thread has seen, and stays.
  struct alignas(64) Line {
    float floats[16];
  };
  thread_local std::vector<Line> buffer;
  if (buffer.size() * 16 < floats) buffer.resize((floats + 15) / 16);
  return reinterpret_cast<float*>(buffer.data());
}

// Every item once, taken by whichever thread is free: items differ in size.
template <class Body>
void for_each_item(int64_t items, Body body) {
  int64_t workers = std::min<int64_t>(at::get_num_threads(), items);
  if (workers <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(i);
  });
}

template <class Body>
void for_each_row(int64_t rows, int64_t width, Body body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(width, 1)),
                   [&](int64_t from, int64_t to) {
                     for (int64_t row = from; row < to; ++row) body(row);
                   });
}

int64_t panels(int64_t out) { return (out + kPanel - 1) / kPanel; }

char* at_row(const at::Tensor& t, int64_t row) {
  return static_cast<char*>(t.data_ptr()) + row * t.stride(0) * t.element_size();
}

}  // namespace
}  // namespace dh

using dh::element;
using dh::guarded;

extern "C" {

const char* dh_kernels_name() { return dh::kernels().name; }

// What the rows of one step see. Lengths are checked on the Rust side, where the plan is made.
struct dh_plan {
  const dh::Tile* tiles;
  int64_t tile_count;
  const dh::Rest* rests;
  const uint32_t* slots;
};

at::Tensor* dh_attend(const at::Tensor* q, const at::Tensor* k, const at::Tensor* v, const dh_plan* plan,
                      int64_t window, float scale) {
  at::Tensor* result = nullptr;
  guarded([&] {
    dh::check(*q, *q, "q");
    dh::check(*k, *q, "k");
    dh::check(*v, *q, "v");
    at::Tensor out = at::empty_like(*q);
    dh::AttendArgs args{q->data_ptr(), k->data_ptr(), v->data_ptr(), out.data_ptr(), q->size(1), k->size(0),
                        q->size(2),    k->size(1),    plan->tiles,   plan->rests,    plan->slots, window,
                        scale};
    TORCH_CHECK(args.q_heads % args.kv_heads == 0 && k->size(2) == args.head_dim, "heads of q and k differ");
    dh::Element type = element(*q);
    const dh::Kernels& kernels = dh::kernels();
    dh::for_each_item(plan->tile_count * args.kv_heads, [&](int64_t item) {
      const dh::Tile& tile = args.tiles[item / args.kv_heads];
      kernels.attend(type, args, tile, item % args.kv_heads, dh::scratch(kernels.attend_scratch(args, tile.rows)));
    });
    result = new at::Tensor(out);
  });
  return result;
}

// Lays the weights [out, in] of one part out for dh_linear: `weight` is as a file has it, `format` a dh::Format. Null
// on failure.
at::Tensor* dh_linear_pack(const void* weight, int format, int64_t out, int64_t in) {
  at::Tensor* result = nullptr;
  guarded([&] {
    dh::Format as = static_cast<dh::Format>(format);
    const dh::Kernels& kernels = dh::kernels();
    int64_t bytes = kernels.packed_bytes(as, in), row = kernels.file_bytes(as, in);
    at::Tensor packed = at::empty({dh::panels(out) * bytes}, at::kByte);
    char* to = static_cast<char*>(packed.data_ptr());
    at::parallel_for(0, dh::panels(out), 1, [&](int64_t from, int64_t until) {
      for (int64_t panel = from; panel < until; ++panel) {
        int64_t first = panel * dh::kPanel, outputs = std::min(dh::kPanel, out - first);
        kernels.pack(as, static_cast<const char*>(weight) + first * row, to + panel * bytes, outputs, in);
      }
    });
    result = new at::Tensor(packed);
  });
  return result;
}

// Bytes of a row in a file, or 0 where no row is that wide.
int64_t dh_file_bytes(int format, int64_t in) {
  return dh::kernels().file_bytes(static_cast<dh::Format>(format), in);
}

struct dh_part {
  const at::Tensor* packed;
  int64_t out;
  int format;
};

// x: [rows, in] to [rows, out], in x's type or, if `wide`, in float32. `bias` may be null. Null on failure.
at::Tensor* dh_linear(const at::Tensor* x, const dh_part* parts, int64_t part_count, const at::Tensor* bias, int wide) {
  at::Tensor* result = nullptr;
  guarded([&] {
    const dh::Kernels& kernels = dh::kernels();
    dh::Format plain = element(*x) == dh::Element::F32 ? dh::Format::F32 : dh::Format::BF16;
    int64_t rows = x->size(0), in = kernels.packed_inputs(plain, x->size(1)), out = 0, panels = 0;
    c10::SmallVector<dh::Part, 4> packed;
    for (const dh_part* part = parts; part < parts + part_count; ++part) {
      dh::Format format = static_cast<dh::Format>(part->format);
      TORCH_CHECK((format == dh::Format::F32) == (plain == dh::Format::F32), "x is not of the weight's type");
      TORCH_CHECK(part->packed->nbytes() == dh::panels(part->out) * kernels.packed_bytes(format, in),
                  "x is not as wide as the weight");
      packed.push_back({part->packed->data_ptr(), part->out, format});
      out += part->out;
      panels += dh::panels(part->out);
    }
    at::Tensor input = in == x->size(1) ? x->contiguous() : at::constant_pad_nd(*x, {0, in - x->size(1)});
    at::Tensor y = at::empty({rows, out}, x->options().dtype(wide ? at::kFloat : x->scalar_type()));
    at::Tensor offset = bias ? bias->to(y.scalar_type()).contiguous() : at::Tensor();
    dh::LinearArgs args{input.data_ptr(), packed.data(), part_count, bias ? offset.data_ptr() : nullptr, y.data_ptr(),
                        rows, in, out, element(y)};
    int64_t grain = std::max<int64_t>(1, 4 * dh::kGrain / (dh::kPanel * std::max<int64_t>(in, 1)));
    size_t floats = kernels.linear_scratch(args);
    at::parallel_for(0, panels, grain,
                     [&](int64_t from, int64_t to) { kernels.linear(args, from, to, dh::scratch(floats)); });
    result = new at::Tensor(y);
  });
  return result;
}

// Rows `ids` of a packed weight of blocks, [count, in] in bfloat16. Null on failure.
at::Tensor* dh_linear_rows(const dh_part* part, int64_t in, const int64_t* ids, int64_t count) {
  at::Tensor* result = nullptr;
  guarded([&] {
    const dh::Kernels& kernels = dh::kernels();
    dh::Format format = static_cast<dh::Format>(part->format);
    int64_t bytes = kernels.packed_bytes(format, in);
    TORCH_CHECK(part->packed->nbytes() == dh::panels(part->out) * bytes, "the weight has another width");
    at::Tensor out = at::empty({count, in}, at::kBFloat16);
    const char* panels = static_cast<const char*>(part->packed->data_ptr());
    dh::for_each_row(count, in, [&](int64_t row) {
      int64_t id = ids[row];
      kernels.unpack(format, panels + id / dh::kPanel * bytes, in, id % dh::kPanel, dh::at_row(out, row));
    });
    result = new at::Tensor(out);
  });
  return result;
}

struct dh_rotation {
  const at::Tensor* cos;
  const at::Tensor* sin;
  const at::Tensor* q_norm;  // null without
  const at::Tensor* k_norm;
  float eps;
};

// qkv: [rows, (q_heads + 2 kv_heads) * head_dim]; rows that ask nothing have no q. Returns the rotated q; k and v go to
// their slots.
at::Tensor* dh_rotate_store(const at::Tensor* qkv, const at::Tensor* k, const at::Tensor* v,
                            const dh_rotation* rotation, const uint32_t* positions, const uint32_t* slots) {
  at::Tensor* result = nullptr;
  guarded([&] {
    dh::check(*qkv, *k, "qkv");
    dh::check(*v, *k, "v");
    int64_t rows = qkv->size(0), kv_heads = k->size(0), head_dim = k->size(2);
    int64_t q_heads = qkv->size(1) / head_dim - 2 * kv_heads;
    TORCH_CHECK(q_heads >= 0 && (q_heads + 2 * kv_heads) * head_dim == qkv->size(1), "qkv has a wrong width");
    at::Tensor q = at::empty({rows, q_heads, head_dim}, qkv->options());
    auto weight = [&](const at::Tensor* norm) -> const void* {
      if (!norm) return nullptr;
      dh::check(*norm, *k, "norm");
      return norm->data_ptr();
    };
    dh::RotateArgs args{qkv->data_ptr(),
                        q.data_ptr(),
                        k->data_ptr(),
                        v->data_ptr(),
                        q_heads,
                        kv_heads,
                        head_dim,
                        k->size(1),
                        rotation->cos->const_data_ptr<float>(),
                        rotation->sin->const_data_ptr<float>(),
                        positions,
                        slots,
                        weight(rotation->q_norm),
                        weight(rotation->k_norm),
                        rotation->eps};
    dh::for_each_row(rows, qkv->size(1), [&](int64_t row) {
      dh::kernels().rotate_store(element(q), args, row, dh::scratch(head_dim));
    });
    result = new at::Tensor(q);
  });
  return result;
}

// With `delta`, x += delta first, in place.
at::Tensor* dh_rms_norm(const at::Tensor* x, const at::Tensor* delta, const at::Tensor* weight, float eps) {
  at::Tensor* result = nullptr;
  guarded([&] {
    if (!x->is_cpu()) {
      if (delta) x->add_(*delta);
      result = new at::Tensor(at::rms_norm(*x, {x->size(1)}, *weight, eps));
      return;
    }
    dh::check(*x, *x, "x");
    dh::check(*weight, *x, "weight");
    if (delta) dh::check(*delta, *x, "delta");
    at::Tensor out = at::empty_like(*x);
    int64_t width = x->size(1);
    dh::for_each_row(x->size(0), width, [&](int64_t row) {
      dh::kernels().rms_norm(element(*x), dh::at_row(*x, row), delta ? dh::at_row(*delta, row) : nullptr,
                             weight->data_ptr(), dh::at_row(out, row), width, eps);
    });
    result = new at::Tensor(out);
  });
  return result;
}

// gate_up: [rows, 2 * width], gates first. `activation` is a dh::Activation.
at::Tensor* dh_gate_mul(const at::Tensor* gate_up, int activation) {
  at::Tensor* result = nullptr;
  guarded([&] {
    int64_t rows = gate_up->size(0), width = gate_up->size(1) / 2;
    if (!gate_up->is_cpu()) {
      at::Tensor gate = gate_up->narrow(1, 0, width), up = gate_up->narrow(1, width, width);
      bool gelu = static_cast<dh::Activation>(activation) == dh::Activation::kGeluTanh;
      result = new at::Tensor((gelu ? at::gelu(gate, "tanh") : at::silu(gate)) * up);
      return;
    }
    dh::check(*gate_up, *gate_up, "gate_up");
    at::Tensor out = at::empty({rows, width}, gate_up->options());
    dh::for_each_row(rows, width, [&](int64_t row) {
      const char* gate = dh::at_row(*gate_up, row);
      dh::kernels().gate_mul(element(out), static_cast<dh::Activation>(activation), gate,
                             gate + width * out.element_size(), dh::at_row(out, row), width);
    });
    result = new at::Tensor(out);
  });
  return result;
}

// Copies a float32 or bfloat16 tensor to `out`, as float32.
int dh_to_host(const at::Tensor* from, float* out, int64_t count) {
  return guarded([&] {
    TORCH_CHECK(from->numel() == count, "tensor has ", from->numel(), " elements, not ", count);
    at::Tensor x = from->cpu().contiguous();
    if (x.scalar_type() == at::kBFloat16) {
      const char* data = static_cast<const char*>(x.data_ptr());
      at::parallel_for(0, count, 4 * dh::kGrain, [&](int64_t at, int64_t to) {
        dh::kernels().widen(data + at * x.element_size(), out + at, to - at);
      });
    } else {
      x = x.to(at::kFloat);
      memcpy(out, x.const_data_ptr<float>(), count * sizeof(float));
    }
  });
}

// pool: [kv_heads, slots, head_dim]; copies slot moves[2i] to slot moves[2i + 1], in order.
int dh_move_slots(const at::Tensor* pool, const uint32_t* moves, int64_t count) {
  return guarded([&] {
    int64_t heads = pool->size(0), row = pool->size(2) * pool->element_size();
    for (int64_t i = 0; i < count; ++i) {
      if (!pool->is_cpu()) {
        pool->select(1, moves[2 * i + 1]).copy_(pool->select(1, moves[2 * i]));
        continue;
      }
      for (int64_t head = 0; head < heads; ++head) {
        char* base = static_cast<char*>(pool->data_ptr()) + head * pool->size(1) * row;
        memmove(base + moves[2 * i + 1] * row, base + moves[2 * i] * row, row);
      }
    }
  });
}

}  // extern "C"
