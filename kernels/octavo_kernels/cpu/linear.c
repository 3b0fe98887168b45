/* Matrix products with prepacked weights: out[M, N] = x[M, K] @ W[N, K]^T (+ bias).
 *
 * W is stored as panels of 16 outputs, [ceil(N / 16)][K][16], so the inner loop reads it as one stream: a decode step
 * is bound by the memory's speed. Each output element is summed over k in one fixed order, whatever M is: a row's
 * result does not depend on its batch-mates. Weights are float32 or bfloat16, activations and sums float32.
 */
#include "common.h"

#define PANEL 16
#define ROWS 6
#define BLOCK_K 1024
#define BLOCK_M 96

/* One tile: `rows` x 16 outputs, k in [0, kn). `first` starts the sums at the bias instead of what `out` holds. */
INLINE void tile(const int rows, const int bf16, const float *x, int64_t ldx, const void *w, int64_t kn,
                 const float *bias, int first, float *out, int64_t ldo, int cols) {
  v8 acc[ROWS][2];
  float edge[ROWS * PANEL];
  float *dst = out;
  int64_t ldd = ldo;
  if (cols < PANEL) {
    dst = edge;
    ldd = PANEL;
    if (!first)
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < PANEL; c++) edge[r * PANEL + c] = c < cols ? out[r * ldo + c] : 0.0f;
  }
  for (int r = 0; r < rows; r++) {
    if (!first) {
      acc[r][0] = *(const v8 *)(dst + r * ldd);
      acc[r][1] = *(const v8 *)(dst + r * ldd + 8);
      continue;
    }
    acc[r][0] = splat(0.0f);
    acc[r][1] = splat(0.0f);
    if (bias)
      for (int c = 0; c < 8; c++) {
        acc[r][0][c] = c < cols ? bias[c] : 0.0f;
        acc[r][1][c] = c + 8 < cols ? bias[c + 8] : 0.0f;
      }
  }
  for (int64_t k = 0; k < kn; k++) {
    v8 b0, b1;
    if (bf16) {
      const uint16_t *p = (const uint16_t *)w + k * PANEL;
      b0 = load_bf16(p);
      b1 = load_bf16(p + 8);
    } else {
      const float *p = (const float *)w + k * PANEL;
      b0 = *(const v8 *)p;
      b1 = *(const v8 *)(p + 8);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      v8 s = splat(x[r * ldx + k]);
      acc[r][0] += s * b0;
      acc[r][1] += s * b1;
    }
  }
  for (int r = 0; r < rows; r++) {
    *(v8 *)(dst + r * ldd) = acc[r][0];
    *(v8 *)(dst + r * ldd + 8) = acc[r][1];
  }
  if (cols < PANEL)
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) out[r * ldo + c] = edge[r * PANEL + c];
}

#define CASE(n)                                                              \
  case n:                                                                    \
    if (bf16)                                                                \
      tile(n, 1, x, ldx, w, kn, bias, first, out, ldo, cols);                \
    else                                                                     \
      tile(n, 0, x, ldx, w, kn, bias, first, out, ldo, cols);                \
    break;

static void tile_any(int rows, int bf16, const float *x, int64_t ldx, const void *w, int64_t kn, const float *bias,
                     int first, float *out, int64_t ldo, int cols) {
  switch (rows) {
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
  }
}

/* a: 0 M | 1 x float[M, ldx] | 2 ldx | 3 W packed [ceil(N/16)][K][16] | 4 bias float[N] or 0 | 5 out float[M, ldo]
 *    | 6 ldo | 7 N | 8 K | 9 W is bfloat16 */
EXPORT void oct_linear(const int64_t *a) {
  const int64_t M = a[0], ldx = a[2], ldo = a[6], N = a[7], K = a[8];
  const float *x = PTR(const float, 1), *bias = PTR(const float, 4);
  const char *w = PTR(const char, 3);
  float *out = PTR(float, 5);
  const int bf16 = (int)a[9];
  const int64_t elem = bf16 ? 2 : 4, panels = (N + PANEL - 1) / PANEL;
  for (int64_t m0 = 0; m0 < M; m0 += BLOCK_M) {
    const int64_t mn = M - m0 < BLOCK_M ? M - m0 : BLOCK_M;
    const int64_t tiles = (mn + ROWS - 1) / ROWS;
#pragma omp for schedule(dynamic, 4) nowait
    for (int64_t p = 0; p < panels; p++) {
      const int cols = N - p * PANEL < PANEL ? (int)(N - p * PANEL) : PANEL;
      for (int64_t k0 = 0; k0 < K; k0 += BLOCK_K) {
        const int64_t kn = K - k0 < BLOCK_K ? K - k0 : BLOCK_K;
        const char *wp = w + (p * K + k0) * PANEL * elem;
        float wide[BLOCK_K * PANEL] __attribute__((aligned(64)));
        /* With many rows a bfloat16 panel is widened once instead of once per tile. */
        const int widen = bf16 && tiles > 2;
        if (widen) {
          for (int64_t i = 0; i < kn * PANEL; i += 8) *(v8 *)(wide + i) = load_bf16((const uint16_t *)wp + i);
          wp = (const char *)wide;
        }
        for (int64_t t = 0; t < tiles; t++) {
          const int64_t r0 = m0 + t * mn / tiles, r1 = m0 + (t + 1) * mn / tiles;
          tile_any((int)(r1 - r0), bf16 && !widen, x + r0 * ldx + k0, ldx, wp, kn, bias ? bias + p * PANEL : NULL, k0 == 0,
                   out + r0 * ldo + p * PANEL, ldo, cols);
        }
      }
    }
  }
#pragma omp barrier
}

/* a: 0 N | 1 source [N, K] (float32, or bfloat16 where 5 is set) | 2 packed | 3 K | 4 packed is bfloat16
 *    | 5 source is bfloat16 | 6 the row of the packed matrix that the first of the source becomes. Others are left alone. */
EXPORT void oct_pack(const int64_t *a) {
  const int64_t N = a[0], K = a[3], first = a[6];
  const int to_bf16 = (int)a[4], from_bf16 = (int)a[5];
#pragma omp for schedule(static)
  for (int64_t p = first / PANEL; p < (first + N + PANEL - 1) / PANEL; p++) {
    const int64_t from = p * PANEL < first ? first - p * PANEL : 0;
    const int64_t to = (p + 1) * PANEL > first + N ? first + N - p * PANEL : PANEL;
    for (int64_t k = 0; k < K; k++)
      for (int64_t c = from; c < to; c++) {
        const int64_t n = p * PANEL + c - first, at = (p * K + k) * PANEL + c;
        const float f =
            from_bf16 ? bf16_to_float(PTR(const uint16_t, 1)[n * K + k]) : PTR(const float, 1)[n * K + k];
        if (to_bf16)
          PTR(uint16_t, 2)[at] = float_to_bf16(f);
        else
          PTR(float, 2)[at] = f;
      }
  }
}

/* Embedding rows taken from a packed [N, K] matrix (a tied output head needs no second copy).
 * a: 0 T | 1 ids int32[T] | 2 W packed | 3 out float[T, ldo] | 4 ldo | 5 N | 6 K | 7 W is bfloat16.
 * An id outside [0, N) gives a row of zeros. */
EXPORT void oct_embed(const int64_t *a) {
  const int64_t T = a[0], ldo = a[4], N = a[5], K = a[6];
  const int32_t *ids = PTR(const int32_t, 1);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < T; t++) {
    float *out = PTR(float, 3) + t * ldo;
    const int64_t id = ids[t];
    if (id < 0 || id >= N) {
      memset(out, 0, K * sizeof(float));
      continue;
    }
    const int64_t base = (id / PANEL) * K * PANEL + id % PANEL;
    if (a[7])
      for (int64_t k = 0; k < K; k++) out[k] = bf16_to_float(PTR(const uint16_t, 2)[base + k * PANEL]);
    else
      for (int64_t k = 0; k < K; k++) out[k] = PTR(const float, 2)[base + k * PANEL];
  }
}
