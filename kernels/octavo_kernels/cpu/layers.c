/* Norms, activation, rotary + per-head norm + KV write in one pass, page copies. Activations are float32. */
#include "common.h"

/* x -> w * x / rms(x); rows may alias. H need not be a multiple of 8. */
INLINE void norm_row(const float *x, const float *w, float *out, int64_t H, float eps) {
  v8 sum = splat(0.0f);
  float tail = 0.0f;
  int64_t i = 0;
  for (; i + 8 <= H; i += 8) {
    v8 v = *(const v8 *)(x + i);
    sum += v * v;
  }
  for (; i < H; i++) tail += x[i] * x[i];
  const float scale = 1.0f / sqrtf((hsum(sum) + tail) / (float)H + eps);
  for (i = 0; i + 8 <= H; i += 8) *(v8 *)(out + i) = *(const v8 *)(w + i) * (*(const v8 *)(x + i) * scale);
  for (; i < H; i++) out[i] = w[i] * (x[i] * scale);
}

/* a: 0 T | 1 x float[T, ldx] | 2 ldx | 3 weight float[H] | 4 out float[T, ldo] | 5 ldo | 6 H | 7 eps */
EXPORT void oct_rms_norm(const int64_t *a) {
  const int64_t T = a[0];
#pragma omp for schedule(static)
  for (int64_t t = 0; t < T; t++)
    norm_row(PTR(const float, 1) + t * a[2], PTR(const float, 3), PTR(float, 4) + t * a[5], a[6],
             (float)as_double(a[7]));
}

/* residual += x, out = norm(residual).
 * a: 0 T | 1 x float[T, ldx] | 2 ldx | 3 weight float[H] | 4 out float[T, ldo] | 5 ldo | 6 H | 7 eps
 *    | 8 residual float[T, H] */
EXPORT void oct_add_rms_norm(const int64_t *a) {
  const int64_t T = a[0], H = a[6];
#pragma omp for schedule(static)
  for (int64_t t = 0; t < T; t++) {
    const float *x = PTR(const float, 1) + t * a[2];
    float *res = PTR(float, 8) + t * H;
    for (int64_t i = 0; i < H; i++) res[i] += x[i];
    norm_row(res, PTR(const float, 3), PTR(float, 4) + t * a[5], H, (float)as_double(a[7]));
  }
}

/* The rows named by `index`: out = norm(residual[index] + x[index]); nothing is written back.
 * a: 0 R | 1 x float[T, H] | 2 residual float[T, H] | 3 index int32[R] | 4 weight float[H] | 5 out float[R, H] | 6 H
 *    | 7 eps */
EXPORT void oct_gather_add_rms_norm(const int64_t *a) {
  const int64_t R = a[0], H = a[6];
#pragma omp for schedule(static)
  for (int64_t r = 0; r < R; r++) {
    const int64_t t = PTR(const int32_t, 3)[r];
    const float *x = PTR(const float, 1) + t * H, *res = PTR(const float, 2) + t * H;
    float *out = PTR(float, 5) + r * H;
    for (int64_t i = 0; i < H; i++) out[i] = x[i] + res[i];
    norm_row(out, PTR(const float, 4), out, H, (float)as_double(a[7]));
  }
}

INLINE v8 vtanh(v8 x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

/* out = act(gate) * up with gate_up = [gate | up]; act 0: SiLU, 1: GELU (tanh form).
 * a: 0 T | 1 gate_up float[T, 2I] | 2 out float[T, I] | 3 I | 4 act. I need not be a multiple of 8. */
EXPORT void oct_act_and_mul(const int64_t *a) {
  const int64_t T = a[0], I = a[3], blocks = (I + 511) / 512;
#pragma omp for schedule(static) collapse(2)
  for (int64_t t = 0; t < T; t++)
    for (int64_t b = 0; b < blocks; b++) {
      const float *gate = PTR(const float, 1) + t * 2 * I, *up = gate + I;
      float *out = PTR(float, 2) + t * I;
      const int64_t end = (b + 1) * 512 < I ? (b + 1) * 512 : I;
      for (int64_t i = b * 512; i < end; i += 8) {
        const int n = end - i < 8 ? (int)(end - i) : 8;
        v8 g = splat(0.0f), u = splat(0.0f);
        memcpy(&g, gate + i, n * sizeof(float));
        memcpy(&u, up + i, n * sizeof(float));
        if (a[4] == 0)
          g = g / (1.0f + vexp(-g));
        else
          g = 0.5f * g * (1.0f + vtanh(0.7978845608028654f * (g + 0.044715f * g * g * g)));
        g *= u;
        memcpy(out + i, &g, n * sizeof(float));
      }
    }
}

/* Per-head norm (optional) and rotary embedding of q and k in place, then k and v into their pages, in one pass.
 * a: 0 T | 1 qkv float[T, ld] = [Hq | Hk | Hk] heads of D | 2 ld | 3 positions int32[T]
 *    | 4 table float[P, rot] = [cos rot/2 | sin rot/2] | 5 rot (0: no rotary) | 6 Hq | 7 Hk | 8 D
 *    | 9 q norm weight float[D] or 0 | 10 k norm weight float[D] or 0 | 11 eps
 *    | 12 slots int32[T], block * block_size + offset, negative: not written
 *    | 13 K pages [blocks, Hk, D, block_size] | 14 V pages [blocks, Hk, block_size, D] | 15 block_size
 *    | 16 pages are bfloat16 | 17 P. A position outside the table is clamped to it. */
EXPORT void oct_rope_kv(const int64_t *a) {
  const int64_t T = a[0], ld = a[2], rot = a[5], Hq = a[6], Hk = a[7], D = a[8], bs = a[15], P = a[17];
  const int64_t half = rot / 2, heads = Hq + 2 * Hk;
  const float eps = (float)as_double(a[11]);
#pragma omp for schedule(static) collapse(2)
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < heads; h++) {
      float *x = PTR(float, 1) + t * ld + h * D;
      if (h < Hq + Hk) {
        const float *w = h < Hq ? PTR(const float, 9) : PTR(const float, 10);
        if (w) norm_row(x, w, x, D, eps);
        int64_t pos = PTR(const int32_t, 3)[t];
        pos = pos < 0 ? 0 : (pos >= P ? P - 1 : pos);
        const float *cos = PTR(const float, 4) + pos * rot, *sin = cos + half;
        for (int64_t i = 0; i < half; i++) {
          const float x1 = x[i], x2 = x[half + i];
          x[i] = x1 * cos[i] - x2 * sin[i];
          x[half + i] = x2 * cos[i] + x1 * sin[i];
        }
      }
      const int64_t slot = PTR(const int32_t, 12)[t];
      if (h < Hq || slot < 0) continue;
      const int64_t block = slot / bs, at = slot % bs;
      if (h < Hq + Hk) {
        const int64_t base = (block * Hk + (h - Hq)) * D * bs + at;
        for (int64_t d = 0; d < D; d++) {
          if (a[16])
            PTR(uint16_t, 13)[base + d * bs] = float_to_bf16(x[d]);
          else
            PTR(float, 13)[base + d * bs] = x[d];
        }
      } else {
        const int64_t base = ((block * Hk + (h - Hq - Hk)) * bs + at) * D;
        for (int64_t d = 0; d < D; d++) {
          if (a[16])
            PTR(uint16_t, 14)[base + d] = float_to_bf16(x[d]);
          else
            PTR(float, 14)[base + d] = x[d];
        }
      }
    }
}

/* Whole pages, all layers, from one tensor [layers, pages, page_bytes] to another or the same one; layers and pages may lie
 * at any distance. No page of one tensor is both a source and a destination.
 * a: 0 moves | 1 src int32[moves] | 2 dst int32[moves] | 3 layers | 4 page_bytes | 5 address of the tensor read
 *    | 6 bytes from layer to layer | 7 bytes from page to page | 8, 9, 10 the same of the tensor written */
EXPORT void oct_move_pages(const int64_t *a) {
  const int64_t n = a[0], layers = a[3], bytes = a[4];
#pragma omp for schedule(static) collapse(2)
  for (int64_t l = 0; l < layers; l++)
    for (int64_t i = 0; i < n; i++)
      memcpy(PTR(char, 8) + l * a[9] + PTR(const int32_t, 2)[i] * a[10],
             PTR(const char, 5) + l * a[6] + PTR(const int32_t, 1)[i] * a[7], bytes);
}
