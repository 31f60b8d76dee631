// The plain-data seam between the ATen half of the shim and the kernels, which are compiled once per
// instruction set. Nothing here may pull in a library header with inline code: the linker would be free to
// keep the copy that needs AVX-512.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dh {

// Keys are visited in blocks of this many absolute positions, so that a row's sum has one order, however its
// token came.
constexpr int64_t kBlock = 32;

enum class Element : int32_t { F32 = 0, BF16 = 1 };

// Of a gate.
enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// How weights lie, by ggml's numbers: plain, or in blocks of codes with their scales.
enum class Format : int32_t {
  F32 = 0,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30,
};

// Consecutive rows of one request that share the keys at positions 0 .. shared_blocks * kBlock.
struct Tile {
  uint32_t first_row;
  uint32_t rows;
  uint32_t shared_at;  // index into `slots`
  uint32_t shared_blocks;
};

// A row's own keys: from position shared_blocks * kBlock up to and including the row's own position.
struct Rest {
  uint32_t at;  // index into `slots`
  uint32_t len;
};

struct AttendArgs {
  const void* q;  // [rows, q_heads, head_dim]
  const void* k;  // [kv_heads, pool_slots, head_dim]
  const void* v;
  void* out;  // [rows, q_heads, head_dim]
  int64_t q_heads, kv_heads, head_dim, pool_slots;
  const Tile* tiles;
  const Rest* rests;  // one per row
  const uint32_t* slots;
  int64_t window;  // 0: none; else row i sees keys j with i - window < j
  float scale;
};

struct RotateArgs {
  const void* qkv;  // [rows, (q_heads + 2 kv_heads) * head_dim]
  void* q;          // [rows, q_heads, head_dim]
  void* k;          // [kv_heads, pool_slots, head_dim]
  void* v;
  int64_t q_heads, kv_heads, head_dim, pool_slots;
  const float* cos;  // [positions, head_dim / 2]
  const float* sin;
  const uint32_t* positions;  // one per row
  const uint32_t* slots;      // one per row
  const void* q_norm;         // [head_dim], or null
  const void* k_norm;
  float eps;
};

// Outputs that are packed, computed and stored together, and inputs of one bfloat16 tile.
constexpr int64_t kPanel = 32;
constexpr int64_t kDepth = 32;

// Consecutive outputs of a projection whose weights lie alike.
struct Part {
  const void* packed;
  int64_t out;
  Format format;
};

// y = x W^T + bias.
struct LinearArgs {
  const void* x;  // [rows, in]; for bfloat16, `in` is a whole number of tiles (see matmul.h)
  const Part* parts;
  int64_t part_count;
  const void* bias;  // [out] of `result`'s type, or null
  void* y;           // [rows, out]
  int64_t rows, in, out;
  Element result;  // of y
};

// Every function works on whole rows or whole (tile, head) pairs, and a row's result depends on that row alone.
struct Kernels {
  const char* name;
  size_t (*attend_scratch)(const AttendArgs&, uint32_t tile_rows);  // floats
  void (*attend)(Element, const AttendArgs&, const Tile&, int64_t kv_head, float* scratch);
  void (*rotate_store)(Element, const RotateArgs&, int64_t row, float* scratch /* head_dim */);
  // out = rms_norm(x) * weight. With `delta`, x += delta first, in place.
  void (*rms_norm)(Element, void* x, const void* delta, const void* weight, void* out, int64_t width, float eps);
  // out = activation(gate) * up
  void (*gate_mul)(Element, Activation, const void* gate, const void* up, void* out, int64_t width);
  void (*widen)(const void* bf16, float* out, int64_t count);
  // A panel is kPanel outputs; its inputs are padded for some formats.
  int64_t (*packed_inputs)(Format, int64_t in);
  int64_t (*packed_bytes)(Format, int64_t in);  // of a panel
  int64_t (*file_bytes)(Format, int64_t in);    // of a row in a file, or 0 where no row is that wide
  // `weight` are the rows of one panel, one per output, as in a file.
  void (*pack)(Format, const void* weight, void* panel, int64_t outputs, int64_t in);
  size_t (*linear_scratch)(const LinearArgs&);  // floats
  // Panels count through all parts.
  void (*linear)(const LinearArgs&, int64_t from_panel, int64_t to_panel, float* scratch);
  // The weights of one output of a panel of blocks, in bfloat16.
  void (*unpack)(Format, const void* panel, int64_t in, int64_t output, void* out);
};

const Kernels& kernels_baseline();
const Kernels& kernels_v3();
const Kernels& kernels_v4();
const Kernels& kernels_amx();

// The best of them for this processor.
const Kernels& kernels();

}  // namespace dh
