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

// Outputs that are packed, computed and stored together.
constexpr int64_t kPanel = 32;

// y = x W^T + bias.
struct LinearArgs {
  const void* x;       // [rows, in]; for bfloat16, `in` is a whole number of tiles (see matmul.h)
  const void* packed;  // W
  const void* bias;    // [out] of `result`'s type, or null
  void* y;             // [rows, out]
  int64_t rows, in, out;
  Element type;    // of x and W
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
  int64_t (*packed_size)(Element, int64_t out, int64_t in);  // elements
  int64_t (*packed_inputs)(Element, int64_t in);             // inputs with their padding
  void (*pack)(Element, const void* weight, void* packed, int64_t out, int64_t in, int64_t panel);
  void (*linear)(const LinearArgs&, int64_t from_panel, int64_t to_panel);
};

const Kernels& kernels_baseline();
const Kernels& kernels_v3();
const Kernels& kernels_v4();
const Kernels& kernels_amx();

// The best of them for this processor.
const Kernels& kernels();

}  // namespace dh
