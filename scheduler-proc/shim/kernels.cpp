// The CPU kernels. build.rs compiles this file once per instruction set, with DH_KERNELS naming the table.
// All code has internal linkage and no library header with inline code is included (see kernels.h).
#include <cstring>

#include "kernels.h"
#include "matmul.h"
#include "vector.h"

namespace dh {
namespace {

// A lane is one query head of one row. Its queries, sums and weights lie in scratch, `stride` floats apart.
struct Lanes {
  float* q;    // [lanes, stride], scaled
  float* acc;  // [lanes, stride]
  float* p;    // [lanes, kBlock]
  float* max;
  float* sum;
  int64_t stride;
};

template <class T>
struct Block {
  const T* keys[kBlock];
  const T* values[kBlock];
  int64_t count;  // valid keys; the first lies at `position`
  int64_t position;
};

// p[lane][j] = q[lane] . key[j], for LANES lanes at once. VECS is the head's width in vectors, 0 if unusual.
template <class T, int VECS, int LANES>
DH_INLINE void scores(const Lanes& lanes, int64_t at, const Block<T>& block, int64_t head_dim) {
  F16 part[LANES][kBlock];
  const float* q = lanes.q + at * lanes.stride;
  for (int64_t j = 0; j < block.count; ++j) {
    const T* key = block.keys[j];
    F16 dot[LANES] = {};
    if (VECS > 0) {
#pragma GCC unroll 8
      for (int64_t d = 0; d < VECS; ++d) {
        F16 k = load(key + d * kWidth);
#pragma GCC unroll 4
        for (int64_t l = 0; l < LANES; ++l) dot[l] = dot[l] + load(q + l * lanes.stride + d * kWidth) * k;
      }
    } else {
      for (int64_t d = 0; d < head_dim; d += kWidth) {
        F16 k = load_at(key, d, head_dim);
        for (int64_t l = 0; l < LANES; ++l) dot[l] = dot[l] + load(q + l * lanes.stride + d) * k;
      }
    }
#pragma GCC unroll 4
    for (int64_t l = 0; l < LANES; ++l) part[l][j] = dot[l];
  }
  for (int64_t l = 0; l < LANES; ++l) {
    for (int64_t j = block.count; j < kBlock; ++j) part[l][j] = splat(kNegInf);
    float* p = lanes.p + (at + l) * kBlock;
    store(p, sums16(part[l]));
    store(p + kWidth, sums16(part[l] + kWidth));
  }
}

// acc[lane] += p[lane][j] * value[j], in the order of the keys.
template <class T, int VECS, int LANES>
DH_INLINE void accumulate(const Lanes& lanes, int64_t at, const Block<T>& block, int64_t head_dim) {
  float* acc = lanes.acc + at * lanes.stride;
  const float* p = lanes.p + at * kBlock;
  // Unusual widths go through the same arithmetic, one vector of the head at a time.
  constexpr int STEP = VECS > 0 && VECS <= 4 ? VECS : (VECS == 8 ? 4 : 1);
  for (int64_t from = 0; from < head_dim; from += STEP * kWidth) {
    F16 sums[LANES][STEP];
#pragma GCC unroll 4
    for (int64_t l = 0; l < LANES; ++l) {
#pragma GCC unroll 4
      for (int64_t d = 0; d < STEP; ++d) sums[l][d] = load(acc + l * lanes.stride + from + d * kWidth);
    }
    for (int64_t j = 0; j < block.count; ++j) {
      F16 v[STEP];
#pragma GCC unroll 4
      for (int64_t d = 0; d < STEP; ++d) {
        v[d] = VECS > 0 ? load(block.values[j] + from + d * kWidth) : load_at(block.values[j], from, head_dim);
      }
#pragma GCC unroll 4
      for (int64_t l = 0; l < LANES; ++l) {
        F16 weight = splat(p[l * kBlock + j]);
#pragma GCC unroll 4
        for (int64_t d = 0; d < STEP; ++d) sums[l][d] = sums[l][d] + weight * v[d];
      }
    }
#pragma GCC unroll 4
    for (int64_t l = 0; l < LANES; ++l) {
#pragma GCC unroll 4
      for (int64_t d = 0; d < STEP; ++d) store(acc + l * lanes.stride + from + d * kWidth, sums[l][d]);
    }
  }
}

// Online softmax: turns scores into weights and rescales what was summed so far. Keys before `start` are unseen.
__attribute__((noinline)) void soften(const Lanes& lanes, int64_t lane, int64_t position, int64_t start) {
  float* p = lanes.p + lane * kBlock;
  for (int64_t j = 0; j < start - position && j < kBlock; ++j) p[j] = kNegInf;
  F16 low = load(p), high = load(p + kWidth);
  float block_max = max(select(low > high, low, high));
  float old_max = lanes.max[lane];
  float new_max = block_max > old_max ? block_max : old_max;
  if (new_max == kNegInf) {
    store(p, splat(0.0f));
    store(p + kWidth, splat(0.0f));
    return;
  }
  low = exp16(low - new_max);
  high = exp16(high - new_max);
  store(p, low);
  store(p + kWidth, high);
  float weight = sum(low + high);
  if (new_max != old_max) {
    F16 shrink = exp16(splat(old_max - new_max));
    float* acc = lanes.acc + lane * lanes.stride;
    for (int64_t d = 0; d < lanes.stride; d += kWidth) store(acc + d, load(acc + d) * shrink);
    lanes.sum[lane] *= shrink[0];
    lanes.max[lane] = new_max;
  }
  lanes.sum[lane] += weight;
}

template <class T, int VECS, int LANES>
void visit_lanes(const Lanes& lanes, int64_t at, const Block<T>& block, const int64_t* starts, int64_t head_dim) {
  scores<T, VECS, LANES>(lanes, at, block, head_dim);
  for (int64_t l = 0; l < LANES; ++l) soften(lanes, at + l, block.position, starts[at + l]);
  accumulate<T, VECS, LANES>(lanes, at, block, head_dim);
}

// Folds one block of keys and values into the lanes `from .. to`. How lanes are grouped changes no result.
template <class T, int VECS>
void visit(const Lanes& lanes, int64_t from, int64_t to, const Block<T>& block, const int64_t* starts,
           int64_t head_dim) {
  int64_t at = from;
  for (; to - at >= 4; at += 4) visit_lanes<T, VECS, 4>(lanes, at, block, starts, head_dim);
  switch (to - at) {
    case 3: return visit_lanes<T, VECS, 3>(lanes, at, block, starts, head_dim);
    case 2: return visit_lanes<T, VECS, 2>(lanes, at, block, starts, head_dim);
    case 1: return visit_lanes<T, VECS, 1>(lanes, at, block, starts, head_dim);
  }
}

template <class T>
void gather(Block<T>& block, const AttendArgs& a, int64_t kv_head, const uint32_t* slots, int64_t count) {
  const T* k = static_cast<const T*>(a.k) + kv_head * a.pool_slots * a.head_dim;
  const T* v = static_cast<const T*>(a.v) + kv_head * a.pool_slots * a.head_dim;
  block.count = count;
  for (int64_t j = 0; j < count; ++j) {
    block.keys[j] = k + slots[j] * a.head_dim;
    block.values[j] = v + slots[j] * a.head_dim;
  }
}

size_t attend_scratch(const AttendArgs& a, uint32_t tile_rows) {
  int64_t lanes = tile_rows * (a.q_heads / a.kv_heads);
  return lanes * (2 * round_up(a.head_dim, kWidth) + kBlock + 2 + sizeof(int64_t) / sizeof(float));
}

template <class T>
void load_queries(const Lanes& lanes, const AttendArgs& a, const Tile& tile, int64_t kv_head) {
  int64_t group = a.q_heads / a.kv_heads;
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t g = 0; g < group; ++g) {
      int64_t lane = r * group + g;
      const T* q =
          static_cast<const T*>(a.q) + ((tile.first_row + r) * a.q_heads + kv_head * group + g) * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; d += kWidth) {
        store(lanes.q + lane * lanes.stride + d, load_at(q, d, a.head_dim) * a.scale);
        store(lanes.acc + lane * lanes.stride + d, splat(0.0f));
      }
      lanes.max[lane] = kNegInf;
      lanes.sum[lane] = 0.0f;
    }
  }
}

template <class T>
void store_results(const Lanes& lanes, const AttendArgs& a, const Tile& tile, int64_t kv_head) {
  int64_t group = a.q_heads / a.kv_heads;
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t g = 0; g < group; ++g) {
      int64_t lane = r * group + g;
      T* out = static_cast<T*>(a.out) + ((tile.first_row + r) * a.q_heads + kv_head * group + g) * a.head_dim;
      F16 total = splat(lanes.sum[lane]);
      for (int64_t d = 0; d < a.head_dim; d += kWidth) {
        store_at(out, d, a.head_dim, load(lanes.acc + lane * lanes.stride + d) / total);
      }
    }
  }
}

template <class T, int VECS>
void attend_tile(const AttendArgs& a, const Tile& tile, int64_t kv_head, float* scratch) {
  int64_t group = a.q_heads / a.kv_heads, count = tile.rows * group;
  Lanes lanes;
  lanes.stride = round_up(a.head_dim, kWidth);
  lanes.q = scratch;
  lanes.acc = lanes.q + count * lanes.stride;
  lanes.p = lanes.acc + count * lanes.stride;
  int64_t* starts = reinterpret_cast<int64_t*>(lanes.p + count * kBlock);
  lanes.max = reinterpret_cast<float*>(starts + count);
  lanes.sum = lanes.max + count;
  load_queries<T>(lanes, a, tile, kv_head);

  const Rest* rests = a.rests + tile.first_row;
  int64_t shared_len = tile.shared_blocks * kBlock, first_start = INT64_MAX;
  for (int64_t r = 0; r < tile.rows; ++r) {
    int64_t length = shared_len + rests[r].len;
    int64_t start = a.window > 0 && length > a.window ? length - a.window : 0;
    for (int64_t g = 0; g < group; ++g) starts[r * group + g] = start;
    first_start = start < first_start ? start : first_start;
  }
  Block<T> block;
  for (int64_t b = first_start / kBlock; b < tile.shared_blocks; ++b) {
    block.position = b * kBlock;
    gather(block, a, kv_head, a.slots + tile.shared_at + block.position, kBlock);
    visit<T, VECS>(lanes, 0, count, block, starts, a.head_dim);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t at = 0; at < rests[r].len; at += kBlock) {
      int64_t left = rests[r].len - at;
      block.position = shared_len + at;
      gather(block, a, kv_head, a.slots + rests[r].at + at, left < kBlock ? left : kBlock);
      visit<T, VECS>(lanes, r * group, (r + 1) * group, block, starts, a.head_dim);
    }
  }
  store_results<T>(lanes, a, tile, kv_head);
}

template <class T>
void attend_width(const AttendArgs& a, const Tile& tile, int64_t kv_head, float* scratch) {
  switch (a.head_dim) {
    case 64: return attend_tile<T, 4>(a, tile, kv_head, scratch);
    case 128: return attend_tile<T, 8>(a, tile, kv_head, scratch);
    default: return attend_tile<T, 0>(a, tile, kv_head, scratch);
  }
}

void attend(Element element, const AttendArgs& a, const Tile& tile, int64_t kv_head, float* scratch) {
  if (element == Element::F32) {
    attend_width<float>(a, tile, kv_head, scratch);
  } else {
    attend_width<bf16>(a, tile, kv_head, scratch);
  }
}

template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
  F16 squares = {};
  for (int64_t d = 0; d < width; d += kWidth) {
    F16 v = load_at(x, d, width);
    squares = squares + v * v;
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / width + eps);
}

// One head: normalised if it has a norm, then its halves rotated against each other.
template <class T>
void rotate_head(const RotateArgs& a, const T* x, const void* norm, uint32_t position, T* out, float* buffer) {
  int64_t half = a.head_dim / 2;
  F16 factor = splat(norm ? inverse_rms(x, a.head_dim, a.eps) : 1.0f);
  for (int64_t d = 0; d < a.head_dim; d += kWidth) {
    F16 v = load_at(x, d, a.head_dim);
    if (norm) v = v * factor * load_at(static_cast<const T*>(norm), d, a.head_dim);
    store_at(buffer, d, a.head_dim, v);
  }
  const float* cos = a.cos + position * half;
  const float* sin = a.sin + position * half;
  for (int64_t d = 0; d < half; d += kWidth) {
    F16 lo = load_at(buffer, d, half), hi = load_at(buffer + half, d, half);
    F16 c = load_at(cos, d, half), s = load_at(sin, d, half);
    F16 turned = hi * s;
    store_at(out, d, half, lo * c - turned);
    turned = lo * s;
    store_at(out + half, d, half, hi * c + turned);
  }
}

template <class T>
void rotate_row(const RotateArgs& a, int64_t row, float* buffer) {
  const T* x = static_cast<const T*>(a.qkv) + row * (a.q_heads + 2 * a.kv_heads) * a.head_dim;
  T* q = static_cast<T*>(a.q) + row * a.q_heads * a.head_dim;
  for (int64_t h = 0; h < a.q_heads; ++h, x += a.head_dim, q += a.head_dim) {
    rotate_head(a, x, a.q_norm, a.positions[row], q, buffer);
  }
  int64_t at = a.slots[row] * a.head_dim, next_head = a.pool_slots * a.head_dim;
  T* k = static_cast<T*>(a.k) + at;
  for (int64_t h = 0; h < a.kv_heads; ++h, x += a.head_dim, k += next_head) {
    rotate_head(a, x, a.k_norm, a.positions[row], k, buffer);
  }
  T* v = static_cast<T*>(a.v) + at;
  for (int64_t h = 0; h < a.kv_heads; ++h, x += a.head_dim, v += next_head) {
    memcpy(v, x, a.head_dim * sizeof(T));
  }
}

void rotate_store(Element element, const RotateArgs& a, int64_t row, float* buffer) {
  element == Element::F32 ? rotate_row<float>(a, row, buffer) : rotate_row<bf16>(a, row, buffer);
}

template <class T>
void rms_norm_row(T* x, const T* delta, const T* weight, T* out, int64_t width, float eps) {
  if (delta) {
    for (int64_t d = 0; d < width; d += kWidth) {
      store_at(x, d, width, load_at(x, d, width) + load_at(delta, d, width));
    }
  }
  F16 factor = splat(inverse_rms(x, width, eps));
  for (int64_t d = 0; d < width; d += kWidth) {
    store_at(out, d, width, load_at(x, d, width) * factor * load_at(weight, d, width));
  }
}

void rms_norm(Element element, void* x, const void* delta, const void* weight, void* out, int64_t width,
              float eps) {
  if (element == Element::F32) {
    rms_norm_row<float>(static_cast<float*>(x), static_cast<const float*>(delta),
                        static_cast<const float*>(weight), static_cast<float*>(out), width, eps);
  } else {
    rms_norm_row<bf16>(static_cast<bf16*>(x), static_cast<const bf16*>(delta), static_cast<const bf16*>(weight),
                       static_cast<bf16*>(out), width, eps);
  }
}

// Both activations are g / (1 + e^-s(g)): silu with s = g, and the tanh form of gelu with
// s = 2 sqrt(2 / pi) (g + 0.044715 g^3), since (1 + tanh x) / 2 = 1 / (1 + e^-2x).
template <class T, Activation A>
void gate_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t d = 0; d < width; d += kWidth) {
    F16 g = load_at(gate, d, width);
    F16 steep = A == Activation::kSilu ? g : g * (g * g * 0.044715f + 1.0f) * 1.5957691216f;
    // e^-s overflows where the result is 0 anyway.
    F16 away = -steep;
    F16 bounded = select(away > splat(88.0f), splat(88.0f), away);
    store_at(out, d, width, g / (exp16(bounded) + 1.0f) * load_at(up, d, width));
  }
}

template <Activation A>
void gate_mul_as(Element element, const void* gate, const void* up, void* out, int64_t width) {
  if (element == Element::F32) {
    gate_mul_row<float, A>(static_cast<const float*>(gate), static_cast<const float*>(up),
                           static_cast<float*>(out), width);
  } else {
    gate_mul_row<bf16, A>(static_cast<const bf16*>(gate), static_cast<const bf16*>(up), static_cast<bf16*>(out),
                          width);
  }
}

void gate_mul(Element element, Activation activation, const void* gate, const void* up, void* out, int64_t width) {
  if (activation == Activation::kSilu) {
    gate_mul_as<Activation::kSilu>(element, gate, up, out, width);
  } else {
    gate_mul_as<Activation::kGeluTanh>(element, gate, up, out, width);
  }
}

void widen(const void* from, float* out, int64_t count) {
  const bf16* x = static_cast<const bf16*>(from);
  for (int64_t d = 0; d < count; d += kWidth) store_at(out, d, count, load_at(x, d, count));
}

#define DH_TEXT_(x) #x
#define DH_TEXT(x) DH_TEXT_(x)
constexpr Kernels kTable = {DH_TEXT(DH_KERNELS), attend_scratch, attend,       rotate_store, rms_norm, gate_mul, widen,
                            packed_inputs,       packed_bytes,   file_bytes,   pack,         linear_scratch,
                            linear,              unpack};

}  // namespace

const Kernels& DH_KERNELS() { return kTable; }

}  // namespace dh
