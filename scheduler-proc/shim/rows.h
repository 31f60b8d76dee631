// Products of rows and plain panels in vector registers: of float32, and of bfloat16 where there are no tiles.
// Internal linkage, as in vector.h.
#pragma once
#include "panel.h"

namespace dh {
namespace {

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

}  // namespace
}  // namespace dh
