// GGUF's blocks of quantised weights, decoded to the bfloat16 that loading them as such would give. Products of codes
// and scales are exact in float32, so it does not matter whether a minimum is added to them fused. Internal linkage,
// as in vector.h.
//
// A panel (see matmul.h) is a row of cells, each of kPanel outputs by kDepth inputs: the cell's codes, then its scales,
// an array of all outputs for each kind of scale. Where scales have scales of their own, over 256 inputs, those come
// before the cells. Codes of 4 bits lie in words, one word per input for each 4 outputs; longer ones in bytes.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace dh {
namespace {

enum class Scaling {
  kHalf,         // a half-precision scale per block
  kHalfMin,      // and a minimum
  kSuper,        // 6 bits for a scale and a minimum, over 8 blocks a half-precision scale of each
  kSuperHalves,  // 8 bits per half of a block, over 8 blocks a half-precision scale
};

struct Layout {
  // Of a block in a file.
  int64_t inputs, bytes;
  bool nibbles;
  Scaling scaling;

  // In a panel.
  constexpr int64_t cells() const { return inputs / kDepth; }
  constexpr int64_t code_bytes() const { return kPanel * kDepth / (nibbles ? 2 : 1); }
  constexpr int64_t scale_bytes() const { return scaling == Scaling::kHalfMin ? 4 * kPanel : 2 * kPanel; }
  constexpr int64_t cell_bytes() const { return code_bytes() + scale_bytes(); }
  constexpr int64_t head_bytes() const {
    return scaling == Scaling::kSuper ? 4 * kPanel : scaling == Scaling::kSuperHalves ? 2 * kPanel : 0;
  }
  constexpr int64_t group_bytes() const { return head_bytes() + cells() * cell_bytes(); }
};

constexpr Layout layout(Format format) {
  switch (format) {
    case Format::Q4_0: return {32, 18, true, Scaling::kHalf};
    case Format::Q4_1: return {32, 20, true, Scaling::kHalfMin};
    case Format::Q5_0: return {32, 22, false, Scaling::kHalf};
    case Format::Q5_1: return {32, 24, false, Scaling::kHalfMin};
    case Format::Q8_0: return {32, 34, false, Scaling::kHalf};
    case Format::Q4_K: return {256, 144, true, Scaling::kSuper};
    case Format::Q5_K: return {256, 176, false, Scaling::kSuper};
    case Format::Q6_K: return {256, 210, false, Scaling::kSuperHalves};
    case Format::F32:
    case Format::BF16: break;
  }
  return {0, 0, false, Scaling::kHalf};
}

template <Format F>
struct As {
  static constexpr Format format = F;
};

// Calls `body` with the format as a type; false if it is none of blocks.
template <class Body>
DH_INLINE bool as_blocks(Format format, Body body) {
  switch (format) {
    case Format::Q4_0: body(As<Format::Q4_0>()); return true;
    case Format::Q4_1: body(As<Format::Q4_1>()); return true;
    case Format::Q5_0: body(As<Format::Q5_0>()); return true;
    case Format::Q5_1: body(As<Format::Q5_1>()); return true;
    case Format::Q8_0: body(As<Format::Q8_0>()); return true;
    case Format::Q4_K: body(As<Format::Q4_K>()); return true;
    case Format::Q5_K: body(As<Format::Q5_K>()); return true;
    case Format::Q6_K: body(As<Format::Q6_K>()); return true;
    case Format::F32:
    case Format::BF16: break;
  }
  return false;
}

// Bytes of a panel of `in` inputs.
DH_INLINE int64_t panel_bytes(Format format, int64_t in) {
  Layout l = layout(format);
  return in / l.inputs * l.group_bytes();
}

// Bytes of a row of a file, or 0 where `in` is no whole number of blocks.
DH_INLINE int64_t row_bytes(Format format, int64_t in) {
  Layout l = layout(format);
  return l.inputs > 0 && in % l.inputs == 0 ? in / l.inputs * l.bytes : 0;
}

struct Cell {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* head;
};

template <Format F>
DH_INLINE Cell cell_at(const uint8_t* panel, int64_t index) {
  constexpr Layout l = layout(F);
  const uint8_t* head = panel + index / l.cells() * l.group_bytes();
  const uint8_t* codes = head + l.head_bytes() + index % l.cells() * l.cell_bytes();
  return {codes, codes + l.code_bytes(), head};
}

// ---- From a file's block. `part` is the number of its 32 inputs.

template <Format F>
DH_INLINE void read_codes(const uint8_t* block, int64_t part, uint8_t* codes) {
  constexpr bool fifth = F == Format::Q5_0 || F == Format::Q5_1;
  const int64_t half = kDepth / 2;
  if constexpr (F == Format::Q8_0) {
    memcpy(codes, block + 2, kDepth);
  } else if constexpr (F == Format::Q4_K || F == Format::Q5_K) {
    const uint8_t* low = block + layout(F).bytes - 128 + part / 2 * kDepth;
    const uint8_t* high = block + 16;
    for (int64_t i = 0; i < kDepth; ++i) {
      codes[i] = (low[i] >> (part % 2 * 4)) & 15;
      if (F == Format::Q5_K) codes[i] |= ((high[i] >> part) & 1) << 4;
    }
  } else if constexpr (F == Format::Q6_K) {
    const uint8_t* low = block + part / 4 * 64 + part % 2 * kDepth;
    const uint8_t* high = block + 128 + part / 4 * kDepth;
    for (int64_t i = 0; i < kDepth; ++i) {
      codes[i] = (((low[i] >> (part % 4 / 2 * 4)) & 15) | (((high[i] >> (part % 4 * 2)) & 3) << 4)) - 32;
    }
  } else {
    const uint8_t* low = block + layout(F).bytes - half;
    uint32_t high = 0;
    if (fifth) memcpy(&high, low - 4, 4);
    for (int64_t i = 0; i < half; ++i) {
      codes[i] = low[i] & 15;
      codes[half + i] = low[i] >> 4;
      if (fifth) {
        codes[i] |= ((high >> i) & 1) << 4;
        codes[half + i] |= ((high >> (half + i)) & 1) << 4;
      }
      if (F == Format::Q5_0) {
        codes[i] -= 16;
        codes[half + i] -= 16;
      }
    }
  }
}

// Scales that are arrays of half-precision numbers: copies one of them.
DH_INLINE void put_half(uint8_t* array, int64_t output, const uint8_t* from) { memcpy(array + 2 * output, from, 2); }

template <Format F>
DH_INLINE void put_scales(const uint8_t* block, int64_t part, int64_t output, const Cell& cell) {
  constexpr Layout l = layout(F);
  uint8_t *scales = const_cast<uint8_t*>(cell.scales), *head = const_cast<uint8_t*>(cell.head);
  if constexpr (l.scaling == Scaling::kSuper) {
    put_half(head, output, block);
    put_half(head + 2 * kPanel, output, block + 2);
    const uint8_t* packed = block + 4;
    uint8_t low = packed[part % 4], high = packed[part % 4 + 4];
    if (part >= 4) {
      uint8_t rest = packed[part + 4];
      low = (rest & 15) | (low >> 6 << 4);
      high = (rest >> 4) | (high >> 6 << 4);
    }
    scales[output] = low & 63;
    scales[kPanel + output] = high & 63;
  } else if constexpr (l.scaling == Scaling::kSuperHalves) {
    put_half(head, output, block + 208);
    scales[output] = block[192 + 2 * part];
    scales[kPanel + output] = block[193 + 2 * part];
  } else {
    put_half(scales, output, block);
    if (l.scaling == Scaling::kHalfMin) put_half(scales + 2 * kPanel, output, block + 2);
  }
}

DH_INLINE void put_codes(const uint8_t* codes, bool nibbles, int64_t output, const Cell& cell) {
  if (!nibbles) {
    memcpy(const_cast<uint8_t*>(cell.codes) + output * kDepth, codes, kDepth);
    return;
  }
  uint16_t words[kDepth];
  uint8_t* at = const_cast<uint8_t*>(cell.codes) + output / 4 * sizeof words;
  memcpy(words, at, sizeof words);
  for (int64_t i = 0; i < kDepth; ++i) words[i] |= codes[i] << output % 4 * 4;
  memcpy(at, words, sizeof words);
}

// `rows` are the `outputs` rows of a panel, as in a file.
template <Format F>
void pack_blocks(const uint8_t* rows, uint8_t* panel, int64_t outputs, int64_t in) {
  constexpr Layout l = layout(F);
  memset(panel, 0, panel_bytes(F, in));
  for (int64_t output = 0; output < outputs; ++output) {
    for (int64_t cell = 0; cell < in / kDepth; ++cell) {
      const uint8_t* block = rows + (output * (in / l.inputs) + cell / l.cells()) * l.bytes;
      Cell to = cell_at<F>(panel, cell);
      uint8_t codes[kDepth];
      read_codes<F>(block, cell % l.cells(), codes);
      put_codes(codes, l.nibbles, output, to);
      put_scales<F>(block, cell % l.cells(), output, to);
    }
  }
}

// ---- To bfloat16.

// Of the 16 outputs of a strip, half a panel: a weight is code * scale + min.
struct alignas(64) Scales {
  float scale[2][kWidth];  // the second is used by Scaling::kSuperHalves, for the second half of the inputs
  float min[kWidth];
};

template <Format F>
DH_INLINE void read_scales(const Cell& cell, int64_t strip, Scales& to) {
  constexpr Scaling scaling = layout(F).scaling;
  const int64_t at = strip * kWidth, halves = 2 * at;
  const int8_t* bytes = reinterpret_cast<const int8_t*>(cell.scales) + at;
  if constexpr (scaling == Scaling::kSuper) {
    store(to.scale[0], load_halves(cell.head + halves) * load_bytes(bytes));
    store(to.min, -(load_halves(cell.head + 2 * kPanel + halves) * load_bytes(bytes + kPanel)));
  } else if constexpr (scaling == Scaling::kSuperHalves) {
    F16 over = load_halves(cell.head + halves);
    store(to.scale[0], over * load_bytes(bytes));
    store(to.scale[1], over * load_bytes(bytes + kPanel));
    store(to.min, F16{});
  } else {
    F16 scale = load_halves(cell.scales + halves);
    store(to.scale[0], scale);
    if (F == Format::Q4_0) {
      store(to.min, scale * -8.0f);
    } else {
      store(to.min, scaling == Scaling::kHalfMin ? load_halves(cell.scales + 2 * kPanel + halves) : F16{});
    }
  }
  // Each of them is going to be spread over a vector, which is free from memory, and a shuffle from a register.
  __asm__("" : "+m"(to));
}

// 16 of an output's codes, from input `at` on.
template <Format F>
DH_INLINE F16 load_codes(const Cell& cell, int64_t output, int64_t at) {
  if constexpr (layout(F).nibbles) {
    H16 words;
    memcpy(&words, cell.codes + (output / 4 * kDepth + at) * sizeof(uint16_t), sizeof words);
    words = (words >> output % 4 * 4) & 15;
    return __builtin_convertvector(__builtin_convertvector(words, I16), F16);
  } else {
    return load_bytes(reinterpret_cast<const int8_t*>(cell.codes) + output * kDepth + at);
  }
}

// The kDepth weights of one output.
template <Format F>
DH_INLINE void decode_row(const Cell& cell, const Scales& scales, int64_t output, bf16* row) {
  const int64_t lane = output % kWidth, second = layout(F).scaling == Scaling::kSuperHalves ? 1 : 0;
  F16 low = load_codes<F>(cell, output, 0) * scales.scale[0][lane] + scales.min[lane];
  F16 high = load_codes<F>(cell, output, kWidth) * scales.scale[second][lane] + scales.min[lane];
  store_pair(row, low, high);
}

#ifdef __AVX512BF16__
constexpr int64_t kCodeWords = kDepth * sizeof(uint16_t);

// Codes of 4 bits: 32 weights have 16 values, which are computed and looked up. A table holds the values of two
// outputs, which saves a conversion; the fifth bit of a word says whose are meant, and bits above it nothing.
DH_INLINE void look_up_strip(const uint8_t* codes, const Scales& scales, bf16* rows) {
  const __m512 all = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i code = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 4
  for (int64_t lane = 0; lane < kWidth; lane += 4, codes += kCodeWords, rows += 4 * kDepth) {
    auto values = [&](int64_t i) {
      return _mm512_fmadd_ps(all, _mm512_set1_ps(scales.scale[0][lane + i]), _mm512_set1_ps(scales.min[lane + i]));
    };
    auto look_up = [&](int64_t i, __m512i words, __m512bh table) {
      _mm512_storeu_si512(rows + i * kDepth, _mm512_permutexvar_epi16(words, (__m512i)table));
    };
    auto of_second = [&](__m512i words) { return _mm512_or_si512(_mm512_and_si512(words, code), second); };
    __m512i words = _mm512_loadu_si512(codes);
    __m512bh outer = _mm512_cvtne2ps_pbh(values(0), values(3)), inner = _mm512_cvtne2ps_pbh(values(1), values(2));
    look_up(0, of_second(words), outer);
    look_up(1, of_second(_mm512_srli_epi16(words, 4)), inner);
    look_up(2, _mm512_and_si512(_mm512_srli_epi16(words, 8), code), inner);
    look_up(3, _mm512_srli_epi16(words, 12), outer);
  }
}
#endif

// Rows of kDepth weights, one for each output of a strip.
template <Format F>
DH_INLINE void decode_strip(const Cell& cell, int64_t strip, bf16* rows) {
  Scales scales;
  read_scales<F>(cell, strip, scales);
#ifdef __AVX512BF16__
  if constexpr (layout(F).nibbles) return look_up_strip(cell.codes + strip * kWidth / 4 * kCodeWords, scales, rows);
#endif
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    decode_row<F>(cell, scales, strip * kWidth + lane, rows + lane * kDepth);
  }
}

// The rows of a strip as a tile of a panel: pairs of inputs of all outputs side by side.
DH_INLINE void pair_up(const bf16* rows, bf16* tile) {
#ifdef __AVX512F__
  U16 v[kWidth];
  memcpy(v, rows, sizeof v);
  transpose16(v);
  memcpy(tile, v, sizeof v);
#else
  for (int64_t pair = 0; pair < kWidth; ++pair) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      memcpy(tile + (pair * kWidth + lane) * 2, rows + lane * kDepth + pair * 2, 2 * sizeof(bf16));
    }
  }
#endif
}

constexpr int64_t kFetched = 8;  // cells that are on their way from memory

// Asks for what is decoded soon, which memory would not send by itself in time. Panels lie one behind the other, so it
// need not be of this one.
template <Format F>
DH_INLINE void fetch(const Cell& cell) {
  constexpr int64_t size = layout(F).cell_bytes();
  for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(cell.codes + kFetched * size + byte);
}

// A panel of blocks as a panel of bfloat16.
template <Format F>
void decode_panel(const uint8_t* panel, int64_t in, bf16* to) {
  alignas(64) bf16 rows[kWidth * kDepth];
  for (int64_t at = 0; at < in / kDepth; ++at) {
    const Cell cell = cell_at<F>(panel, at);
    fetch<F>(cell);
    for (int64_t strip = 0; strip < kPanel / kWidth; ++strip, to += kWidth * kDepth) {
      decode_strip<F>(cell, strip, rows);
      pair_up(rows, to);
    }
  }
}

// All weights of one output of a panel.
template <Format F>
void decode_output(const uint8_t* panel, int64_t in, int64_t output, bf16* to) {
  for (int64_t at = 0; at < in / kDepth; ++at, to += kDepth) {
    Cell cell = cell_at<F>(panel, at);
    Scales scales;
    read_scales<F>(cell, output / kWidth, scales);
    decode_row<F>(cell, scales, output, to);
  }
}

}  // namespace
}  // namespace dh
