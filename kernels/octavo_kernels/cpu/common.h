/* Shared by all CPU kernels: vector types, bf16 conversion, vector exp/log, argument decoding.
 *
 * Calling convention. Every kernel is `void name(const int64_t *a)`. Pointers, integers and (bit-cast) doubles lie in
 * `a`; a[0] is always the number of rows. Kernels use orphaned `omp for`: they share the work of whatever parallel
 * region runs them, so a whole recorded program runs inside one region with a barrier after each kernel.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8v __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define PTR(type, i) ((type *)(intptr_t)a[i])

INLINE double as_double(int64_t bits) {
  double d;
  memcpy(&d, &bits, 8);
  return d;
}

INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

INLINE v8 load_bf16(const uint16_t *p) {
  h8 h = *(const h8 *)p;
  return (v8)(__builtin_convertvector(h, u8v) << 16);
}

INLINE float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

INLINE float hsum(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

INLINE v8 vsel(i8 mask, v8 x, v8 y) { return (v8)((mask & (i8)x) | (~mask & (i8)y)); }

INLINE v8 vmax(v8 x, v8 y) { return vsel(x > y, x, y); }

INLINE float hmax(v8 v) {
  float m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
}

/* exp with a degree-6 polynomial after reduction by ln 2 (the Cephes scheme), about 1 ulp; below -87 gives 0. */
INLINE v8 vexp(v8 x) {
  i8 low = x < -87.0f;
  x = vsel(x > splat(88.0f), splat(88.0f), x);
  x = vsel(low, splat(-87.0f), x);
  v8 n = x * 1.44269504088896341f;
  v8 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  n = (n + magic) - magic;
  v8 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  v8 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i8 e = (__builtin_convertvector(n, i8) + 127) << 23;
  v8 y = p * (v8)e;
  return vsel(low, splat(0.0f), y);
}

/* log(1 + r), r in [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes coefficients). */
INLINE v8 log1p_poly(v8 r) {
  v8 z = r * r;
  v8 p = splat(7.0376836292e-2f);
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  return r + (r * z * p - 0.5f * z);
}

/* Natural logarithm of a positive normal number. */
INLINE v8 vlog(v8 x) {
  u8v bits = (u8v)x;
  i8 e = (i8)(bits >> 23) - 126;
  v8 m = (v8)((bits & 0x007fffffu) | 0x3f000000u); /* in [0.5, 1) */
  i8 small = m < 0.707106781186547524f;
  v8 fe = __builtin_convertvector(e + small, v8); /* a true lane is -1 */
  m = vsel(small, m + m, m);
  v8 r = m - 1.0f;
  v8 y = log1p_poly(r);
  return y + fe * -2.12194440e-4f + fe * 0.693359375f;
}
