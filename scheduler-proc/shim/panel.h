// How weights lie in panels, and where the results of one go. Internal linkage, as in vector.h.
//
// A panel is kPanel outputs: for float32, one vector pair per input; for bfloat16, one AMX tile pair (kDepth inputs of
// 16 outputs, two inputs side by side) per kDepth inputs; for blocks, see blocks.h. Padding is zero.
#pragma once
#include "blocks.h"
#include "kernels.h"
#include "vector.h"

namespace dh {
namespace {

// Inputs as they lie in a panel.
int64_t packed_inputs(Format format, int64_t in) { return format == Format::F32 ? in : round_up(in, kDepth); }

DH_INLINE int64_t elements(Format format, int64_t in) { return kPanel * packed_inputs(format, in); }

int64_t packed_bytes(Format format, int64_t in) {
  switch (format) {
    case Format::F32: return elements(format, in) * sizeof(float);
    case Format::BF16: return elements(format, in) * sizeof(bf16);
    default: return panel_bytes(format, in);
  }
}

int64_t file_bytes(Format format, int64_t in) {
  switch (format) {
    case Format::F32: return in * sizeof(float);
    case Format::BF16: return in * sizeof(bf16);
    default: return row_bytes(format, in);
  }
}

// Place of (output, input) inside a panel.
DH_INLINE int64_t packed_at(Format format, int64_t output, int64_t input) {
  if (format == Format::F32) return input * kPanel + output;
  int64_t tile = input / kDepth * 2 + output / kWidth, pair = input % kDepth / 2;
  return tile * kDepth * kWidth + (pair * kWidth + output % kWidth) * 2 + input % 2;
}

template <class T>
void pack_plain(Format format, const T* weight, T* panel, int64_t outputs, int64_t in) {
  memset(panel, 0, elements(format, in) * sizeof(T));
  for (int64_t output = 0; output < outputs; ++output) {
    for (int64_t input = 0; input < in; ++input) panel[packed_at(format, output, input)] = weight[output * in + input];
  }
}

void pack(Format format, const void* weight, void* panel, int64_t outputs, int64_t in) {
  if (format == Format::F32) {
    return pack_plain(format, static_cast<const float*>(weight), static_cast<float*>(panel), outputs, in);
  }
  if (format == Format::BF16) {
    return pack_plain(format, static_cast<const bf16*>(weight), static_cast<bf16*>(panel), outputs, in);
  }
  as_blocks(format, [&](auto as) {
    pack_blocks<as.format>(static_cast<const uint8_t*>(weight), static_cast<uint8_t*>(panel), outputs, in);
  });
}

void unpack(Format format, const void* panel, int64_t in, int64_t output, void* out) {
  as_blocks(format, [&](auto as) {
    decode_output<as.format>(static_cast<const uint8_t*>(panel), in, output, static_cast<bf16*>(out));
  });
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

}  // namespace
}  // namespace dh
