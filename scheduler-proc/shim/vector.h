// Vectors of 16 floats, in whatever registers the instruction set has. Internal linkage throughout, because every
// user is compiled once per instruction set (see kernels.h).
#pragma once
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace dh {
namespace {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint16_t bf16;

constexpr int64_t kWidth = 16;
constexpr float kNegInf = -__builtin_inff();

#define DH_INLINE static inline __attribute__((always_inline))

DH_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

DH_INLINE F16 splat(float x) { return F16{} + x; }

DH_INLINE F16 load(const float* p) {
  F16 x;
  memcpy(&x, p, sizeof x);
  return x;
}

DH_INLINE F16 load(const bf16* p) {
  H16 h;
  memcpy(&h, p, sizeof h);
  return (F16)(__builtin_convertvector(h, U16) << 16);
}

DH_INLINE void store(float* p, F16 x) { memcpy(p, &x, sizeof x); }

DH_INLINE void store(bf16* p, F16 x) {
  U16 bits = (U16)x;
  U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  U16 quiet = (bits >> 16) | 0x40;  // rounding may turn a NaN into infinity
  I16 is_nan = x != x;
  H16 h = __builtin_convertvector(((U16)is_nan & quiet) | (~(U16)is_nan & rounded), H16);
  memcpy(p, &h, sizeof h);
}

// The same of two vectors, one behind the other. Neither may hold a NaN or a denormal.
DH_INLINE void store_pair(bf16* p, F16 low, F16 high) {
#ifdef __AVX512BF16__
  auto both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  memcpy(p, &both, sizeof both);
#else
  store(p, low);
  store(p + kWidth, high);
#endif
}

// 16 numbers of half precision.
DH_INLINE F16 load_halves(const void* p) {
#ifdef __AVX512F__
  // Masked, because GCC warns of what the plain form leaves undefined on purpose.
  return (F16)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
#else
  _Float16 halves[kWidth];
  memcpy(halves, p, sizeof halves);
  F16 x;
  for (int i = 0; i < kWidth; ++i) x[i] = halves[i];
  return x;
#endif
}

// 16 signed bytes, as floats.
DH_INLINE F16 load_bytes(const int8_t* p) {
#ifdef __AVX512F__
  I16 integers = (I16)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return __builtin_convertvector(integers, F16);
#else
  float x[kWidth];
  for (int i = 0; i < kWidth; ++i) x[i] = p[i];
  return load(x);
#endif
}

// The first `n` (< 16) elements, then zeros.
template <class T>
DH_INLINE F16 load_part(const T* p, int64_t n) {
  T buffer[kWidth] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <class T>
DH_INLINE void store_part(T* p, F16 x, int64_t n) {
  T buffer[kWidth];
  store(buffer, x);
  memcpy(p, buffer, n * sizeof(T));
}

template <class T>
DH_INLINE F16 load_at(const T* row, int64_t at, int64_t width) {
  return width - at >= kWidth ? load(row + at) : load_part(row + at, width - at);
}

template <class T>
DH_INLINE void store_at(T* row, int64_t at, int64_t width, F16 x) {
  if (width - at >= kWidth) {
    store(row + at, x);
  } else {
    store_part(row + at, x, width - at);
  }
}

DH_INLINE F16 select(I16 mask, F16 a, F16 b) { return (F16)((mask & (I16)a) | (~mask & (I16)b)); }

DH_INLINE float sum(F16 x) {
  float s[kWidth];
  store(s, x);
  for (int64_t half = 8; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) s[i] += s[i + half];
  }
  return s[0];
}

DH_INLINE float max(F16 x) {
  float s[kWidth];
  store(s, x);
  for (int64_t half = 8; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
  }
  return s[0];
}

// e^x for x <= 88, to about 1 ulp; 0 below -87.
F16 __attribute__((noinline)) exp16(F16 x) {
  I16 tiny = x < splat(-87.0f);
  F16 y = select(tiny, splat(-87.0f), x);
  F16 biased = y * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  F16 n = biased - 12582912.0f;
  F16 r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  F16 r2 = r * r;
  p = p * r2 + r;
  p = p + 1.0f;
  I16 exponent = (__builtin_convertvector(n, I16) + 127) << 23;
  return select(tiny, splat(0.0f), p * (F16)exponent);
}

// Lane j of the result is the sum of part[j].
DH_INLINE F16 sums16(const F16* part) {
  F16 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    F16 x = part[2 * i], y = part[2 * i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    F16 x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    F16 x = b[2 * i], y = b[2 * i + 1];
    c[i] = __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  return __builtin_shufflevector(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Exchanges `v[i][j]` and `v[j][i]`: swaps halves of halves, down to single lanes.
DH_INLINE void transpose16(U16* v) {
#define DH_SWAP(step, ...)                                                          \
  _Pragma("GCC unroll 16") for (int i = 0; i < kWidth; ++i) {                                                \
    if (i & step) continue;                                                         \
    constexpr I16 keep = {__VA_ARGS__};                                             \
    U16 upper = __builtin_shuffle(v[i], v[i + step], keep);                         \
    v[i + step] = __builtin_shuffle(v[i], v[i + step], keep + step);                \
    v[i] = upper;                                                                   \
  }
  DH_SWAP(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
  DH_SWAP(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
  DH_SWAP(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
  DH_SWAP(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef DH_SWAP
}

}  // namespace
}  // namespace dh
