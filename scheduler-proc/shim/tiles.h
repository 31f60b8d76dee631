// Products by AMX's tiles: 16 rows of 32 bfloat16 numbers against as many. Internal linkage, as in vector.h.
#pragma once
#include <immintrin.h>

#include "panel.h"

namespace dh {
namespace {

constexpr int64_t kTileRows = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t height, int64_t words) {
    rows[tile] = static_cast<uint8_t>(height);
    bytes[tile] = static_cast<uint16_t>(4 * words);
  }
};

// Which tiles are set up in this thread, as long as there are any.
class Tiles {
 public:
  ~Tiles() {
    if (set_up_) _tile_release();
  }

  // For `rows` (1 to 32) rows against plain panels: tiles 0-3 hold sums (row half, output half), 4-5 rows, 6-7 weights.
  void for_rows(int64_t rows) {
    int64_t low = rows < kTileRows ? rows : kTileRows, high = rows > kTileRows ? rows - kTileRows : 1;
    const int64_t heights[8] = {low, low, high, high, low, high, kTileRows, kTileRows};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, heights[tile], kWidth);
    set_up(rows, config);
  }

  // For decoded weights against `rows` (1 to 16) rows: tiles 0-1 hold sums (output
  // half), 4 pairs of rows, 6-7 weights.
  void for_weights(int64_t rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kTileRows, tile < 6 ? rows : kWidth);
    set_up(-rows, config);
  }

 private:
  void set_up(int64_t what, const TileConfig& config) {
    if (set_up_ != what) _tile_loadconfig(&config);
    set_up_ = what;
  }

  int64_t set_up_ = 0;
};

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

void panel_by_tiles(const LinearArgs& a, const bf16* panel, const PanelOut& out, Tiles& tiles) {
  for (int64_t row = 0; row < a.rows; row += 2 * kTileRows) {
    int64_t rows = a.rows - row < 2 * kTileRows ? a.rows - row : 2 * kTileRows;
    tiles.for_rows(rows);
    block_by_tiles(a, panel, row, rows, out);
  }
}

// ---- Weights that are decoded on their way.

constexpr int64_t kCell = kPanel * kDepth;
constexpr int64_t kAhead = 2;  // cells that are decoded before the first is multiplied: stores reach a tile late
constexpr int64_t kRing = 4;   // cells of scratch

// x as pairs of inputs: those of all rows side by side.
DH_INLINE const uint32_t* pair_rows(const LinearArgs& a, uint32_t* pairs) {
  const uint32_t* x = static_cast<const uint32_t*>(a.x);
  if (a.rows == 1) return x;
  const int64_t width = a.in / 2;
  for (int64_t at = 0; at < width; at += kWidth) {
    U16 v[kWidth] = {};
    for (int64_t row = 0; row < a.rows; ++row) memcpy(&v[row], x + row * width + at, sizeof v[row]);
    transpose16(v);
    // Each store but the last has its end overwritten by the next.
    for (int64_t i = 0; i < kWidth; ++i) memcpy(pairs + (at + i) * a.rows, &v[i], sizeof v[i]);
  }
  return pairs;
}

// The sums of a strip, [16 outputs, rows], as vectors of outputs.
DH_INLINE void store_strips(const float* sums, const PanelOut& out) {
  const int64_t rows = out.args.rows;
  U16 low[kWidth], high[kWidth];
  memcpy(low, sums, sizeof low);
  memcpy(high, sums + kWidth * kWidth, sizeof high);
  if (rows > 1) {
    transpose16(low);
    transpose16(high);
  }
  for (int64_t row = 0; row < rows; ++row) finish_row(out, row, (F16)low[row], (F16)high[row]);
}

// Up to 16 rows. A weight's tile is a row per output, so that decoding need not interleave them; which operand is the
// left one changes no sum.
template <Format F>
void panel_by_decoding(const LinearArgs& a, const uint8_t* panel, const uint32_t* pairs, bf16* ring,
                       const PanelOut& out) {
  const int64_t cells = a.in / kDepth, stride = a.rows * sizeof(uint32_t);
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t at = 0; at < cells + kAhead; ++at) {
    // In turns, so that the processor does both at a time.
    const bool decodes = at < cells, multiplies = at >= kAhead;
    const Cell cell = cell_at<F>(panel, at);
    bf16* to = ring + at % kRing * kCell;
    const bf16* weights = ring + (at - kAhead) % kRing * kCell;
    fetch<F>(cell);
    if (decodes) decode_strip<F>(cell, 0, to);
    if (multiplies) {
      _tile_loadd(4, pairs, stride);
      _tile_loadd(6, weights, 64);
      _tile_dpbf16ps(0, 6, 4);
    }
    if (decodes) decode_strip<F>(cell, 1, to + kCell / 2);
    if (multiplies) {
      _tile_loadd(7, weights + kCell / 2, 64);
      _tile_dpbf16ps(1, 7, 4);
      pairs += kDepth / 2 * a.rows;
    }
  }
  alignas(64) float sums[kPanel * kWidth];
  const int64_t sums_stride = a.rows == 1 ? sizeof(float) : kWidth * sizeof(float);
  _tile_stored(0, sums, sums_stride);
  _tile_stored(1, sums + kWidth * kWidth, sums_stride);
  store_strips(sums, out);
}

}  // namespace
}  // namespace dh
