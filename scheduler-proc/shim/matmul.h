// Projections: y = x W^T + bias, with W packed once. An element of y is one sum over ascending inputs, whatever the
// number of rows, so a row's bits depend on that row alone. Internal linkage, as in vector.h.
//
// Packed layout: panels of kPanel outputs; in a panel, for float32, one vector pair per input; for bfloat16, one
// AMX tile pair (kDepth inputs of 16 outputs, two inputs side by side) per kDepth inputs. Padding is zero.
#pragma once
#ifdef __AMX_BF16__
#include <immintrin.h>
#endif

#include "kernels.h"
#include "vector.h"

namespace dh {
namespace {

constexpr int64_t kDepth = 32;  // inputs of one bfloat16 tile

// Inputs as they lie in a panel.
DH_INLINE int64_t packed_inputs(Element type, int64_t in) {
  return type == Element::F32 ? in : round_up(in, kDepth);
}

int64_t packed_size(Element type, int64_t out, int64_t in) {
  return round_up(out, kPanel) * packed_inputs(type, in);
}

// Place of (output, input) inside a panel.
DH_INLINE int64_t packed_at(Element type, int64_t output, int64_t input) {
  if (type == Element::F32) return input * kPanel + output;
  int64_t tile = input / kDepth * 2 + output / kWidth, pair = input % kDepth / 2;
  return tile * kDepth * kWidth + (pair * kWidth + output % kWidth) * 2 + input % 2;
}

template <class T>
void pack_panel(Element type, const T* weight, T* panel, int64_t outputs, int64_t in) {
  memset(panel, 0, kPanel * packed_inputs(type, in) * sizeof(T));
  for (int64_t output = 0; output < outputs; ++output) {
    for (int64_t input = 0; input < in; ++input) panel[packed_at(type, output, input)] = weight[output * in + input];
  }
}

void pack(Element type, const void* weight, void* packed, int64_t out, int64_t in, int64_t panel) {
  int64_t first = panel * kPanel, outputs = out - first < kPanel ? out - first : kPanel;
  int64_t from = first * in, to = first * packed_inputs(type, in);
  if (type == Element::F32) {
    pack_panel(type, static_cast<const float*>(weight) + from, static_cast<float*>(packed) + to, outputs, in);
  } else {
    pack_panel(type, static_cast<const bf16*>(weight) + from, static_cast<bf16*>(packed) + to, outputs, in);
  }
}

// Adds the bias and stores the sums of one row of a panel.
template <class T>
DH_INLINE void finish_row(T* y, const T* bias, F16 low, F16 high, int64_t outputs) {
  if (bias) {
    low += load_at(bias, 0, outputs);
    if (outputs > kWidth) high += load_at(bias, kWidth, outputs);
  }
  store_at(y, 0, outputs, low);
  if (outputs > kWidth) store_at(y, kWidth, outputs, high);
}

// Where a panel's results go.
struct PanelOut {
  const LinearArgs& args;
  int64_t first;  // output
  int64_t outputs;
};

template <class T>
DH_INLINE void finish_row(const PanelOut& out, int64_t row, F16 low, F16 high) {
  const T* bias = static_cast<const T*>(out.args.bias);
  T* y = static_cast<T*>(out.args.y) + row * out.args.out + out.first;
  finish_row(y, bias ? bias + out.first : nullptr, low, high, out.outputs);
}

DH_INLINE void finish_row(const PanelOut& out, int64_t row, F16 low, F16 high) {
  out.args.result == Element::F32 ? finish_row<float>(out, row, low, high) : finish_row<bf16>(out, row, low, high);
}

#ifdef __AVX512F__
constexpr int kRows = 8;  // rows whose sums stay in registers
#else
constexpr int kRows = 3;
#endif

// One step of one row: adds what the next input, or pair of inputs, contributes.
DH_INLINE void add(const float* x, const float* w, F16& low, F16& high) {
  low += splat(*x) * load(w);
  high += splat(*x) * load(w + kWidth);
}

DH_INLINE F16 widen_bits(U16 bits) { return (F16)bits; }

DH_INLINE void add_pair(const bf16* x, U16 w, F16& sum) {
  U16 first = U16{} + (uint32_t(x[0]) << 16), second = U16{} + (uint32_t(x[1]) << 16);
  sum += widen_bits(first) * widen_bits(w << 16);
  sum += widen_bits(second) * widen_bits(w & 0xffff0000u);
}

DH_INLINE U16 load_bits(const bf16* p) {
  U16 x;
  memcpy(&x, p, sizeof x);
  return x;
}

template <int ROWS>
DH_INLINE void rows_by_vectors(const LinearArgs& a, const float* panel, int64_t row, const PanelOut& out) {
  const float* x = static_cast<const float*>(a.x) + row * a.in;
  F16 low[ROWS] = {}, high[ROWS] = {};
  for (int64_t k = 0; k < a.in; ++k, panel += kPanel) {
    for (int r = 0; r < ROWS; ++r) add(x + r * a.in + k, panel, low[r], high[r]);
  }
  for (int r = 0; r < ROWS; ++r) finish_row(out, row + r, low[r], high[r]);
}

template <int ROWS>
DH_INLINE void rows_by_vectors(const LinearArgs& a, const bf16* panel, int64_t row, const PanelOut& out) {
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.in;
  F16 low[ROWS] = {}, high[ROWS] = {};
  for (int64_t k = 0; k < a.in; k += kDepth, panel += 2 * kDepth * kWidth) {
    for (int64_t pair = 0; pair < kDepth / 2; ++pair) {
      U16 w_low = load_bits(panel + pair * 2 * kWidth);
      U16 w_high = load_bits(panel + (kDepth / 2 + pair) * 2 * kWidth);
      for (int r = 0; r < ROWS; ++r) {
        add_pair(x + r * a.in + k + 2 * pair, w_low, low[r]);
        add_pair(x + r * a.in + k + 2 * pair, w_high, high[r]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) finish_row(out, row + r, low[r], high[r]);
}

template <int ROWS, class T>
DH_INLINE void last_rows(const LinearArgs& a, const T* panel, int64_t row, const PanelOut& out) {
  if (a.rows - row == ROWS) return rows_by_vectors<ROWS>(a, panel, row, out);
  if constexpr (ROWS > 1) last_rows<ROWS - 1>(a, panel, row, out);
}

template <class T>
void panel_by_vectors(const LinearArgs& a, const T* panel, const PanelOut& out) {
  int64_t row = 0;
  for (; a.rows - row >= kRows; row += kRows) rows_by_vectors<kRows>(a, panel, row, out);
  if constexpr (kRows > 1) {
    if (row < a.rows) last_rows<kRows - 1>(a, panel, row, out);
  }
}

#ifdef __AMX_BF16__

constexpr int64_t kTileRows = 16;

// Tiles 0-3 hold sums (row half, output half), 4-5 rows of x, 6-7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// For blocks of `rows` (1 to 32) rows.
void configure(int64_t rows) {
  int64_t low = rows < kTileRows ? rows : kTileRows, high = rows > kTileRows ? rows - kTileRows : 1;
  const int64_t heights[8] = {low, low, high, high, low, high, kTileRows, kTileRows};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(heights[tile]);
  }
  _tile_loadconfig(&config);
}

DH_INLINE void store_rows(const float* sums, int64_t row, int64_t rows, const PanelOut& out) {
  for (int64_t r = 0; r < rows; ++r) finish_row(out, row + r, load(sums + r * kPanel), load(sums + r * kPanel + kWidth));
}

void block_by_tiles(const LinearArgs& a, const bf16* panel, int64_t row, int64_t rows, const PanelOut& out) {
  alignas(64) float sums[2 * kTileRows * kPanel];
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.in;
  const int64_t stride = a.in * sizeof(bf16), sums_stride = kPanel * sizeof(float);
  const bf16* end = panel + kPanel * a.in;
  _tile_zero(0);
  _tile_zero(1);
  if (rows <= kTileRows) {
    for (; panel < end; panel += 2 * kDepth * kWidth, x += kDepth) {
      // The weights stream by once: their latency is all there is to hide.
      _mm_prefetch(reinterpret_cast<const char*>(panel + 8 * kDepth * kWidth), _MM_HINT_T0);
      _tile_loadd(4, x, stride);
      _tile_loadd(6, panel, 64);
      _tile_loadd(7, panel + kDepth * kWidth, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    const bf16* lower = x + kTileRows * a.in;
    for (; panel < end; panel += 2 * kDepth * kWidth, x += kDepth, lower += kDepth) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, panel, 64);
      _tile_loadd(7, panel + kDepth * kWidth, 64);
      _tile_loadd(5, lower, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + kTileRows * kPanel, sums_stride);
    _tile_stored(3, sums + kTileRows * kPanel + kWidth, sums_stride);
  }
  _tile_stored(0, sums, sums_stride);
  _tile_stored(1, sums + kWidth, sums_stride);
  store_rows(sums, row, rows, out);
}

void panel_by_tiles(const LinearArgs& a, const bf16* panel, const PanelOut& out, int64_t& configured) {
  for (int64_t row = 0; row < a.rows; row += 2 * kTileRows) {
    int64_t rows = a.rows - row < 2 * kTileRows ? a.rows - row : 2 * kTileRows;
    if (rows != configured) configure(configured = rows);
    block_by_tiles(a, panel, row, rows, out);
  }
}

#endif

// Panels `from` to `to` of the projection.
void linear(const LinearArgs& a, int64_t from, int64_t to) {
  int64_t configured = 0;
  for (int64_t panel = from; panel < to; ++panel) {
    int64_t first = panel * kPanel, at = first * packed_inputs(a.type, a.in);
    PanelOut out{a, first, a.out - first < kPanel ? a.out - first : kPanel};
    if (a.type == Element::F32) {
      panel_by_vectors(a, static_cast<const float*>(a.packed) + at, out);
      continue;
    }
    const bf16* weights = static_cast<const bf16*>(a.packed) + at;
#ifdef __AMX_BF16__
    panel_by_tiles(a, weights, out, configured);
#else
    panel_by_vectors(a, weights, out);
#endif
  }
#ifdef __AMX_BF16__
  if (configured) _tile_release();
#endif
  (void)configured;
}

}  // namespace
}  // namespace dh
