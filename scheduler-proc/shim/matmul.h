// Projections: y = x W^T + bias, with W packed once. An element of y is one sum over ascending inputs, whatever the
// number of rows and the format of W, so a row's bits depend on that row and the weights' values alone. Internal
// linkage, as in vector.h.
#pragma once
#include "panel.h"
#include "rows.h"
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace dh {
namespace {

DH_INLINE bool is_blocks(Format format) { return format != Format::F32 && format != Format::BF16; }

// What the panels of one call share.
struct Worker {
  const LinearArgs& args;
  bf16* decoded;  // scratch
#ifdef __AMX_BF16__
  const uint32_t* pairs;  // the rows, where weights are multiplied as they are decoded
  Tiles tiles;
#endif
};

void bfloat_panel(Worker& worker, const bf16* panel, const PanelOut& out) {
#ifdef __AMX_BF16__
  panel_by_tiles(worker.args, panel, out, worker.tiles);
#else
  panel_by_vectors(worker.args, panel, out);
#endif
}

template <Format F>
void block_panel(Worker& worker, const uint8_t* panel, const PanelOut& out) {
#ifdef __AMX_BF16__
  if (worker.pairs) {
    worker.tiles.for_weights(worker.args.rows);
    return panel_by_decoding<F>(worker.args, panel, worker.pairs, worker.decoded, out);
  }
#endif
  decode_panel<F>(panel, worker.args.in, worker.decoded);
  bfloat_panel(worker, worker.decoded, out);
}

void any_panel(Worker& worker, Format format, const uint8_t* panel, const PanelOut& out) {
  switch (format) {
    case Format::F32: return panel_by_vectors(worker.args, reinterpret_cast<const float*>(panel), out);
    case Format::BF16: return bfloat_panel(worker, reinterpret_cast<const bf16*>(panel), out);
    default: as_blocks(format, [&](auto as) { block_panel<as.format>(worker, panel, out); });
  }
}

// Numbers that a decoded panel takes, or that the ring of panel_by_decoding takes.
DH_INLINE int64_t decoded_size(const LinearArgs& a) {
#ifdef __AMX_BF16__
  if (a.rows <= kTileRows) return kRing * kCell;
#endif
  return kPanel * a.in;
}

size_t linear_scratch(const LinearArgs& a) {
  int64_t decoded = decoded_size(a) / 2, pairs = a.rows * a.in / 2 + kWidth;
  for (const Part* part = a.parts; part < a.parts + a.part_count; ++part) {
    if (is_blocks(part->format)) return decoded + pairs;
  }
  return 0;
}

Worker start(const LinearArgs& a, float* scratch) {
#ifdef __AMX_BF16__
  uint32_t* pairs = reinterpret_cast<uint32_t*>(scratch) + decoded_size(a) / 2;
  bool decoding = a.rows <= kTileRows && linear_scratch(a) > 0;
  return {a, reinterpret_cast<bf16*>(scratch), decoding ? pair_rows(a, pairs) : nullptr, {}};
#else
  return {a, reinterpret_cast<bf16*>(scratch)};
#endif
}

// Panels `from` to `to`, counted through the parts.
void linear(const LinearArgs& a, int64_t from, int64_t to, float* scratch) {
  Worker worker = start(a, scratch);
  int64_t panel = 0, output = 0;
  for (const Part* part = a.parts; part < a.parts + a.part_count && panel < to; ++part) {
    const uint8_t* packed = static_cast<const uint8_t*>(part->packed);
    const int64_t bytes = packed_bytes(part->format, a.in);
    for (int64_t first = 0; first < part->out && panel < to; first += kPanel, ++panel, packed += bytes) {
      if (panel < from) continue;
      int64_t left = part->out - first;
      any_panel(worker, part->format, packed, PanelOut{a, output + first, left < kPanel ? left : kPanel});
    }
    output += part->out;
  }
}

}  // namespace
}  // namespace dh
