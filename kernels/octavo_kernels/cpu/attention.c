/* Paged attention of a mixed batch: online softmax (Milakov and Gimelshein, arXiv 1805.02867) over pages, tiled over
 * queries and the query heads that share a KV head (FlashAttention's loop order, arXiv 2205.14135).
 *
 * K pages are stored transposed, [D][block_size], so both products are the same small matrix kernel and need no
 * horizontal sums. The chunks of keys lie at absolute positions and a row's sums never depend on the other rows of
 * its tile: the result for a token is the same bit for bit however its prompt was cut and whoever shares its batch.
 */
#include "common.h"

#define ROWS 6
#define TILE_ROWS 48
#define CHUNK 128
#define PREFETCH_BYTES 16384

/* s[r][0..w) = sum_d q[r][d] * k[d][0..w), w = 8 * vecs */
INLINE void scores(const int rows, const int vecs, const int bf16, const float *q, int64_t D, const void *k, int64_t bs,
                   float *s, int64_t lds) {
  v8 acc[ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vecs; v++) acc[r][v] = splat(0.0f);
  for (int64_t d = 0; d < D; d++) {
    v8 b[2];
    for (int v = 0; v < vecs; v++)
      b[v] = bf16 ? load_bf16((const uint16_t *)k + d * bs + 8 * v) : *(const v8 *)((const float *)k + d * bs + 8 * v);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      v8 x = splat(q[r * D + d]);
      for (int v = 0; v < vecs; v++) acc[r][v] += x * b[v];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vecs; v++) *(v8 *)(s + r * lds + 8 * v) = acc[r][v];
}

/* o[r][0..w) += sum_j p[r][j] * v[j][0..w), w = 8 * vecs */
INLINE void weigh(const int rows, const int vecs, const int bf16, const float *p, int64_t ldp, const void *val,
                  int64_t D, int64_t keys, float *o) {
  v8 acc[ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vecs; v++) acc[r][v] = *(const v8 *)(o + r * D + 8 * v);
  for (int64_t j = 0; j < keys; j++) {
    v8 b[2];
    for (int v = 0; v < vecs; v++)
      b[v] = bf16 ? load_bf16((const uint16_t *)val + j * D + 8 * v) : *(const v8 *)((const float *)val + j * D + 8 * v);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      v8 x = splat(p[r * ldp + j]);
      for (int v = 0; v < vecs; v++) acc[r][v] += x * b[v];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vecs; v++) *(v8 *)(o + r * D + 8 * v) = acc[r][v];
}

#define EACH_ROWS(n, call) \
  switch (n) {             \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6);       \
  }

static void scores_page(int bf16, const float *q, int64_t R, int64_t D, const char *k, int64_t bs, int64_t width,
                        float *s, int64_t lds) {
  const int64_t elem = bf16 ? 2 : 4;
  for (int64_t j = 0; j < width; j += 16) {
    const int wide = width - j > 8;
    for (int64_t r = 0; r < R; r += ROWS) {
      const int n = R - r < ROWS ? (int)(R - r) : ROWS;
#define CALL(rows)                                                                                 \
  if (wide) {                                                                                      \
    if (bf16)                                                                                      \
      scores(rows, 2, 1, q + r * D, D, k + j * elem, bs, s + r * lds + j, lds);                    \
    else                                                                                           \
      scores(rows, 2, 0, q + r * D, D, k + j * elem, bs, s + r * lds + j, lds);                    \
  } else if (bf16)                                                                                 \
    scores(rows, 1, 1, q + r * D, D, k + j * elem, bs, s + r * lds + j, lds);                      \
  else                                                                                             \
    scores(rows, 1, 0, q + r * D, D, k + j * elem, bs, s + r * lds + j, lds)
      EACH_ROWS(n, CALL)
#undef CALL
    }
  }
}

static void weigh_page(int bf16, const float *p, int64_t ldp, int64_t R, const char *v, int64_t D, int64_t keys,
                       float *o) {
  const int64_t elem = bf16 ? 2 : 4;
  for (int64_t d = 0; d < D; d += 16) {
    const int wide = D - d > 8;
    for (int64_t r = 0; r < R; r += ROWS) {
      const int n = R - r < ROWS ? (int)(R - r) : ROWS;
#define CALL(rows)                                                              \
  if (wide) {                                                                   \
    if (bf16)                                                                   \
      weigh(rows, 2, 1, p + r * ldp, ldp, v + d * elem, D, keys, o + r * D + d); \
    else                                                                        \
      weigh(rows, 2, 0, p + r * ldp, ldp, v + d * elem, D, keys, o + r * D + d); \
  } else if (bf16)                                                              \
    weigh(rows, 1, 1, p + r * ldp, ldp, v + d * elem, D, keys, o + r * D + d);   \
  else                                                                          \
    weigh(rows, 1, 0, p + r * ldp, ldp, v + d * elem, D, keys, o + r * D + d)
      EACH_ROWS(n, CALL)
#undef CALL
    }
  }
}

/* One row's online softmax step over s[0..width); keys outside [lo, hi) count nothing. Rescales o. */
static void softmax_row(float *s, int64_t width, int64_t lo, int64_t hi, float cap, float *m, float *l, float *o,
                        int64_t D) {
  if (lo < 0) lo = 0;
  if (hi > width) hi = width;
  if (lo >= hi) {
    memset(s, 0, width * sizeof(float));
    return;
  }
  if (cap > 0.0f)
    for (int64_t j = 0; j < width; j += 8) {
      v8 x = *(v8 *)(s + j) * (2.0f / cap);
      *(v8 *)(s + j) = cap * (1.0f - 2.0f / (vexp(x) + 1.0f));
    }
  for (int64_t j = 0; j < lo; j++) s[j] = -INFINITY;
  for (int64_t j = hi; j < width; j++) s[j] = -INFINITY;
  v8 top = splat(-INFINITY);
  for (int64_t j = 0; j < width; j += 8) top = vmax(*(v8 *)(s + j), top);
  const float best = hmax(top), new_m = best > *m ? best : *m;
  v8 sum = splat(0.0f);
  for (int64_t j = 0; j < width; j += 8) {
    v8 e = vexp(*(v8 *)(s + j) - new_m);
    *(v8 *)(s + j) = e;
    sum += e;
  }
  const float alpha = vexp(splat(*m - new_m))[0];
  if (alpha != 1.0f)
    for (int64_t d = 0; d < D; d += 8) *(v8 *)(o + d) *= alpha;
  *l = *l * alpha + hsum(sum);
  *m = new_m;
}

struct task {
  const float *q;
  float *out;
  const char *k, *v;
  const int32_t *table;
  int64_t ldq, ldo, Hk, G, D, bs, head, window;
  int64_t nq, first; /* queries in this tile and the position of the first */
  float scale, cap;
  int bf16;
};

/* Pages lie anywhere: no hardware prefetcher finds the next one. */
INLINE void prefetch(const char *p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

static void attend(const struct task *t) {
  const int64_t D = t->D, G = t->G, R = t->nq * G, bs = t->bs, elem = t->bf16 ? 2 : 4;
  const int64_t pages = bs >= CHUNK ? 1 : CHUNK / bs, chunk = pages * bs;
  const int64_t hi = t->first + t->nq, lo = t->window > 0 && t->first + 1 > t->window ? t->first + 1 - t->window : 0;
  float q[R * D], o[R * D], m[R], l[R], s[R * chunk];
  for (int64_t r = 0; r < R; r++) {
    const float *src = t->q + (r / G) * t->ldq + (t->head * G + r % G) * D;
    for (int64_t d = 0; d < D; d++) q[r * D + d] = src[d] * t->scale;
    memset(o + r * D, 0, D * sizeof(float));
    m[r] = -INFINITY;
    l[r] = 0.0f;
  }
  for (int64_t c = lo / chunk; c * chunk < hi; c++) {
    const int64_t start = c * chunk, end = start + chunk < hi ? start + chunk : hi;
    const int64_t width = (end - start + 7) & ~(int64_t)7;
    for (int64_t p = start / bs; p * bs < end; p++) {
      if ((p + 1) * bs <= lo) continue;
      const int64_t n = end - p * bs < bs ? end - p * bs : bs;
      const int64_t page = D * bs * elem;
      const char *k = t->k + ((int64_t)t->table[p] * t->Hk + t->head) * page;
      if (page <= PREFETCH_BYTES) {
        prefetch(t->v + ((int64_t)t->table[p] * t->Hk + t->head) * page, n * D * elem);
        if ((p + 1) * bs < hi) prefetch(t->k + ((int64_t)t->table[p + 1] * t->Hk + t->head) * page, page);
      }
      scores_page(t->bf16, q, R, D, k, bs, n, s + p * bs - start, chunk);
    }
    for (int64_t r = 0; r < R; r++) {
      const int64_t pos = t->first + r / G;
      softmax_row(s + r * chunk, width, t->window > 0 ? pos + 1 - t->window - start : 0, pos + 1 - start, t->cap, m + r,
                  l + r, o + r * D, D);
    }
    for (int64_t p = start / bs; p * bs < end; p++) {
      if ((p + 1) * bs <= lo) continue;
      const int64_t from = p * bs > lo ? p * bs : lo, to = (p + 1) * bs < end ? (p + 1) * bs : end;
      const char *v = t->v + (((int64_t)t->table[p] * t->Hk + t->head) * bs + from - p * bs) * D * elem;
      weigh_page(t->bf16, s + from - start, chunk, R, v, D, to - from, o);
    }
  }
  for (int64_t r = 0; r < R; r++) {
    float *dst = t->out + (r / G) * t->ldo + (t->head * G + r % G) * D;
    for (int64_t d = 0; d < D; d++) dst[d] = o[r * D + d] / l[r];
  }
}

/* a: 0 T (unused: the rows follow from query_start) | 1 q float[T, ldq], heads [Hq][D] | 2 ldq
 *    | 3 out float[T, ldo], heads [Hq][D] | 4 ldo | 5 K pages [blocks, Hk, D, block_size]
 *    | 6 V pages [blocks, Hk, block_size, D] | 7 block_tables int32[S, ldt] | 8 ldt | 9 query_start int32[S + 1]
 *    | 10 seq_lens int32[S], the keys of the sequence, this step's included | 11 address of S (int32) | 12 Hq | 13 Hk
 *    | 14 D, a multiple of 8 | 15 block_size, a multiple of 8 | 16 scale | 17 window (0: none) | 18 soft cap (0: none)
 *    | 19 pages are bfloat16. Only pages that hold keys some query sees are read. */
EXPORT void oct_attention(const int64_t *a) {
  const int32_t *start = PTR(const int32_t, 9), *lens = PTR(const int32_t, 10);
  const int64_t S = *PTR(const int32_t, 11), Hk = a[13], G = a[12] / a[13];
  const int64_t per_tile = TILE_ROWS / G > 0 ? TILE_ROWS / G : 1;
  int64_t tiles = 0;
  for (int64_t s = 0; s < S; s++) tiles += (start[s + 1] - start[s] + per_tile - 1) / per_tile;
  struct task t = {.k = PTR(const char, 5), .v = PTR(const char, 6), .ldq = a[2], .ldo = a[4], .Hk = Hk, .G = G,
                   .D = a[14], .bs = a[15], .window = a[17], .scale = (float)as_double(a[16]),
                   .cap = (float)as_double(a[18]), .bf16 = (int)a[19]};
  /* Tiles are taken from the last to the first: long prefills follow the decodes in a batch and should start early.
   * A thread's tiles only go down, so one walk over the sequences finds them all. */
  int64_t seq = S, left = tiles;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < tiles * Hk; i++) {
    const int64_t tile = tiles - 1 - i / Hk;
    while (tile < left) {
      seq--;
      left -= (start[seq + 1] - start[seq] + per_tile - 1) / per_tile;
    }
    const int64_t from = (tile - left) * per_tile, n = start[seq + 1] - start[seq];
    t.nq = n - from < per_tile ? n - from : per_tile;
    t.first = lens[seq] - n + from;
    t.head = i % Hk;
    t.table = PTR(const int32_t, 7) + seq * a[8];
    t.q = PTR(const float, 1) + (start[seq] + from) * a[2];
    t.out = PTR(float, 3) + (start[seq] + from) * a[4];
    attend(&t);
  }
}
