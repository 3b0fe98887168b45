/* Sampling over the vocabulary, one row per sampled token. Row order of business: penalties, logit bias, banned ids,
 * temperature, min-p, top-k, top-p, then Gumbel-max (argmax of z + Gumbel noise draws from softmax(z)). The noise is a
 * pure function of (seed, position, token id): nothing about the batch, the step or earlier draws enters it.
 */
#include "common.h"

#define BUCKETS 4096
#define BUCKETS_PER_UNIT 128.0f

INLINE uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* MurmurHash3's 32-bit finaliser. */
INLINE u8v fmix32(u8v h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

/* Gumbel noise of eight token ids under the key of (seed, position): -log(-log1p(-v)), v uniform in (0, 1). Large
 * noise comes from small v, which a float holds with full relative precision. */
INLINE v8 gumbel(u8v ids, uint64_t key) {
  u8v h = fmix32(fmix32(ids ^ (uint32_t)key) + (uint32_t)(key >> 32));
  v8 v = __builtin_convertvector(h, v8) * 0x1p-32f + 0x1p-33f;
  v = vsel(v < splat(0x1.fffffep-1f), v, splat(0x1.fffffep-1f));
  v8 small = log1p_poly(-v), large = vlog(1.0f - v);
  return -vlog(-vsel(v < splat(0.25f), small, large));
}

/* What became of a row: fine, NaN or +inf in it, nothing left to choose from. */
enum { FINE, NOT_FINITE, NOTHING_LEFT };

struct scratch {
  float *z;
  int32_t *count;
  int32_t *order;
  int64_t V;
};

static __thread struct scratch own;

static int reserve(int64_t V) {
  if (own.V >= V) return 1;
  free(own.z);
  free(own.count);
  free(own.order);
  own.z = malloc((V + 8) * sizeof(float));
  own.count = calloc(V, sizeof(int32_t));
  own.order = malloc(V * sizeof(int32_t));
  own.V = own.z && own.count && own.order ? V : 0;
  return own.V > 0;
}

/* Largest value; *bad is set where the row holds NaN or +inf. */
static float row_max(const float *x, int64_t V, int *bad) {
  v8 top = splat(-INFINITY);
  i8 nan = {0};
  int64_t i = 0;
  for (; i + 8 <= V; i += 8) {
    v8 v = *(const v8 *)(x + i);
    top = vmax(v, top);
    nan |= v != v;
  }
  float m = hmax(top);
  int any = 0;
  for (int k = 0; k < 8; k++) any |= nan[k];
  for (; i < V; i++) {
    if (x[i] != x[i]) any = 1;
    if (x[i] > m) m = x[i];
  }
  *bad = any || m == INFINITY;
  return m;
}

static int64_t row_find(const float *x, int64_t V, float value) {
  int64_t i = 0;
  for (; i + 8 <= V; i += 8) {
    i8 eq = *(const v8 *)(x + i) == splat(value);
    int any = 0;
    for (int k = 0; k < 8; k++) any |= eq[k];
    if (any) break;
  }
  for (; i < V; i++)
    if (x[i] == value) return i;
  return -1;
}

/* log sum exp(x - m). A log-probability is (x - m) less this: through m plus this, large logits would lose digits. */
static double row_log_sum(const float *x, int64_t V, float m) {
  double total = 0.0;
  for (int64_t i = 0; i < V;) {
    v8 part = splat(0.0f);
    const int64_t end = i + 4096 < V ? i + 4096 : V;
    for (; i + 8 <= end; i += 8) part += vexp(*(const v8 *)(x + i) - m);
    total += hsum(part);
    for (; i < end; i++) total += expf(x[i] - m);
  }
  return log(total);
}

static int64_t row_rank(const float *x, int64_t V, float value) {
  i8 above = {0};
  int64_t i = 0, n = 1;
  for (; i + 8 <= V; i += 8) above -= *(const v8 *)(x + i) > splat(value);
  for (int k = 0; k < 8; k++) n += above[k];
  for (; i < V; i++) n += x[i] > value;
  return n;
}

/* The n largest, descending, ties to the lower id. */
static void row_top(const float *x, int64_t V, int64_t n, int32_t *ids, float *values) {
  int64_t have = 0;
  for (int64_t i = 0; i < V; i++) {
    if (have == n && !(x[i] > values[n - 1])) continue;
    int64_t at = have < n ? have++ : n - 1;
    for (; at > 0 && x[i] > values[at - 1]; at--) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = x[i];
    ids[at] = (int32_t)i;
  }
  for (int64_t i = have; i < n; i++) {
    ids[i] = -1;
    values[i] = -INFINITY;
  }
}

static void penalise(float *z, int64_t V, const int32_t *tokens, int64_t len, int64_t output_start, float presence,
                     float frequency, float repetition) {
  int32_t *count = own.count;
  if (repetition != 1.0f) {
    for (int64_t i = 0; i < len; i++) {
      const int64_t id = tokens[i];
      if (id < 0 || id >= V || count[id]) continue;
      count[id] = 1;
      z[id] = z[id] > 0.0f ? z[id] / repetition : z[id] * repetition;
    }
    for (int64_t i = 0; i < len; i++)
      if (tokens[i] >= 0 && tokens[i] < V) count[tokens[i]] = 0;
  }
  if (presence == 0.0f && frequency == 0.0f) return;
  for (int64_t i = output_start; i < len; i++)
    if (tokens[i] >= 0 && tokens[i] < V) count[tokens[i]]++;
  for (int64_t i = output_start; i < len; i++) {
    const int64_t id = tokens[i];
    if (id < 0 || id >= V || !count[id]) continue;
    z[id] -= frequency * (float)count[id] + presence;
    count[id] = 0;
  }
}

static int by_value(const void *x, const void *y) {
  const int32_t i = *(const int32_t *)x, j = *(const int32_t *)y;
  const float a = own.z[i], b = own.z[j];
  return a > b ? -1 : a < b ? 1 : (i > j) - (i < j);
}

INLINE int64_t bucket_of(float below_max) {
  const float b = below_max * BUCKETS_PER_UNIT;
  return b < BUCKETS - 1 ? (int64_t)b : BUCKETS - 1;
}

/* Keeps the `k` best of z (ties to the lower id), then of those the fewest best whose share reaches p; the rest
 * become -inf. A histogram over the distance from the best finds the one bucket that needs sorting. */
static void keep_best(float *z, int64_t V, float m, int64_t k, double p) {
  int32_t count[BUCKETS] = {0};
  double mass[BUCKETS] = {0};
  int64_t alive = 0;
  for (int64_t i = 0; i < V; i++)
    if (z[i] > -INFINITY) {
      count[bucket_of(m - z[i])]++;
      alive++;
    }
  if (k > 0 && k < alive) {
    int64_t b = 0, kept = 0, n = 0;
    while (kept + count[b] < k) kept += count[b++];
    for (int64_t i = 0; i < V; i++) {
      if (!(z[i] > -INFINITY)) continue;
      const int64_t at = bucket_of(m - z[i]);
      if (at == b) own.order[n++] = (int32_t)i;
      if (at > b) z[i] = -INFINITY;
    }
    qsort(own.order, n, sizeof(int32_t), by_value);
    for (int64_t i = k - kept; i < n; i++) z[own.order[i]] = -INFINITY;
  }
  if (p >= 1.0) return;
  double total = 0.0;
  for (int64_t i = 0; i < V; i += 8) {
    v8 e = splat(-INFINITY);
    memcpy(&e, z + i, (V - i < 8 ? V - i : 8) * sizeof(float));
    v8 w = vexp(e - m);
    for (int j = 0; j < 8; j++)
      if (e[j] > -INFINITY) {
        mass[bucket_of(m - e[j])] += w[j];
        total += w[j];
      }
  }
  int64_t b = 0, n = 0;
  double seen = 0.0;
  while (b < BUCKETS - 1 && seen + mass[b] < p * total) seen += mass[b++];
  for (int64_t i = 0; i < V; i++) {
    if (!(z[i] > -INFINITY)) continue;
    const int64_t at = bucket_of(m - z[i]);
    if (at == b) own.order[n++] = (int32_t)i;
    if (at > b) z[i] = -INFINITY;
  }
  qsort(own.order, n, sizeof(int32_t), by_value);
  for (int64_t i = 0; i < n; i++) {
    if (seen >= p * total && !(b == 0 && i == 0)) z[own.order[i]] = -INFINITY;
    seen += vexp(splat(z[own.order[i]] - m))[0];
  }
}

static int64_t gumbel_argmax(const float *z, int64_t V, uint64_t key) {
  float best = -INFINITY;
  int64_t at = -1;
  for (int64_t i = 0; i < V; i += 8) {
    v8 x = splat(-INFINITY);
    memcpy(&x, z + i, (V - i < 8 ? V - i : 8) * sizeof(float));
    /* No noise exceeds 23 (v >= 2^-33): most of a peaked row is passed over without drawing it. */
    if (!(hmax(x) + 23.0f > best)) continue;
    const uint32_t n = (uint32_t)i;
    x += gumbel((u8v){n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7}, key);
    for (int k = 0; k < 8; k++)
      if (x[k] > best) {
        best = x[k];
        at = i + k;
      }
  }
  return at;
}

/* Penalties, bias and banned ids of row r, with the arguments of oct_sample. *z becomes the row: this thread's copy in own.z
 * if anything changes it or `copy` is set, else the logits themselves. *m becomes its largest entry. Returns the status. */
static uint8_t process_row(const int64_t *a, int64_t r, int copy, const float **z, float *m) {
  const int64_t V = a[2];
  const float presence = PTR(const float, 7)[r], frequency = PTR(const float, 8)[r], repetition = PTR(const float, 9)[r];
  const int32_t *bias = PTR(const int32_t, 17) + r, *banned = PTR(const int32_t, 20) + r;
  const int penalties = presence != 0.0f || frequency != 0.0f || repetition != 1.0f;
  int bad;
  *z = PTR(const float, 1) + r * V;
  *m = row_max(*z, V, &bad);
  if (bad) return NOT_FINITE;
  if (penalties || bias[1] > bias[0] || banned[1] > banned[0] || copy) {
    if (!reserve(V)) return NOTHING_LEFT;
    memcpy(own.z, *z, V * sizeof(float));
    *z = own.z;
    if (penalties)
      penalise(own.z, V, PTR(const int32_t, 12) + PTR(const int32_t, 14)[r] * a[13], PTR(const int32_t, 15)[r],
               PTR(const int32_t, 16)[r], presence, frequency, repetition);
    for (int64_t i = bias[0]; i < bias[1]; i++) {
      const int64_t id = PTR(const int32_t, 18)[i];
      if (id >= 0 && id < V) own.z[id] += PTR(const float, 19)[i];
    }
    for (int64_t i = banned[0]; i < banned[1]; i++) {
      const int64_t id = PTR(const int32_t, 21)[i];
      if (id >= 0 && id < V) own.z[id] = -INFINITY;
    }
    *m = row_max(own.z, V, &bad);
  }
  return *m == -INFINITY ? NOTHING_LEFT : FINE;
}

/* a: 0 R | 1 logits float[R, V], not changed | 2 V | 3 temperature float[R] (0: greedy) | 4 top_k int32[R] (0: all)
 *    | 5 top_p float[R] | 6 min_p float[R] | 7 presence float[R] | 8 frequency float[R] | 9 repetition float[R]
 *    | 10 seed int64[R] | 11 position int32[R] | 12 tokens int32[rows, ldh]: prompt and outputs | 13 ldh
 *    | 14 token_row int32[R] | 15 token_count int32[R] | 16 output_start int32[R] | 17 bias_start int32[R + 1]
 *    | 18 bias_ids int32[] | 19 bias_values float[] | 20 banned_start int32[R + 1] | 21 banned_ids int32[]
 *    | 22 out token int32[R] | 23 out status uint8[R] */
EXPORT void oct_sample(const int64_t *a) {
  const int64_t R = a[0], V = a[2];
#pragma omp for schedule(dynamic, 1)
  for (int64_t r = 0; r < R; r++) {
    const float temperature = PTR(const float, 3)[r], min_p = PTR(const float, 6)[r], top_p = PTR(const float, 5)[r];
    const int64_t top_k = PTR(const int32_t, 4)[r];
    int32_t *token = PTR(int32_t, 22) + r;
    uint8_t *status = PTR(uint8_t, 23) + r;
    const float *z;
    float m;
    *token = -1;
    *status = process_row(a, r, temperature > 0.0f, &z, &m);
    if (*status != FINE) continue;
    if (temperature > 0.0f) {
      for (int64_t i = 0; i < V; i++) own.z[i] /= temperature;
      m = m / temperature;
      if (min_p > 0.0f) {
        const float floor = m + logf(min_p);
        for (int64_t i = 0; i < V; i++)
          if (own.z[i] < floor) own.z[i] = -INFINITY;
      }
      if (top_k > 0 || top_p < 1.0f) keep_best(own.z, V, m, top_k, top_p);
      const uint64_t key =
          splitmix64(splitmix64((uint64_t)PTR(const int64_t, 10)[r]) + (uint64_t)PTR(const int32_t, 11)[r]);
      *token = (int32_t)gumbel_argmax(own.z, V, key);
    } else {
      *token = (int32_t)row_find(z, V, m);
    }
    if (*token < 0) *status = NOTHING_LEFT;
  }
}

/* The likeliest tokens of rows and their log-probabilities, the likeliest first, of equals the lower id; never one whose
 * probability is zero.
 * a: 0 to 21 as for oct_sample (temperature, filters, seed and position are not looked at) | 22 wanted int32[R] | 23 N
 *    | 24 out ids int32[R, N] | 25 out logprobs float[R, N] | 26 out found int32[R] | 27 out status uint8[R].
 * Entries from found[r] on mean nothing. */
EXPORT void oct_candidates(const int64_t *a) {
  const int64_t R = a[0], V = a[2], N = a[23];
#pragma omp for schedule(dynamic, 1)
  for (int64_t r = 0; r < R; r++) {
    int64_t n = PTR(const int32_t, 22)[r];
    if (n > N) n = N;
    if (n > V) n = V;
    /* Insertion is quadratic in n: many are selected and sorted instead. */
    const int many = n > 64;
    int32_t *ids = PTR(int32_t, 24) + r * N;
    float *values = PTR(float, 25) + r * N;
    uint8_t *status = PTR(uint8_t, 27) + r;
    const float *z;
    float m;
    PTR(int32_t, 26)[r] = 0;
    *status = process_row(a, r, many, &z, &m);
    if (*status != FINE) continue;
    const double log_sum = row_log_sum(z, V, m);
    if (!isfinite(log_sum)) {
      *status = NOT_FINITE;
      continue;
    }
    if (n <= 0) continue;
    if (many) {
      keep_best(own.z, V, m, n, 1.0);
      int64_t have = 0;
      for (int64_t i = 0; i < V; i++)
        if (own.z[i] > -INFINITY) own.order[have++] = (int32_t)i;
      qsort(own.order, have, sizeof(int32_t), by_value);
      n = have;
      for (int64_t i = 0; i < n; i++) {
        ids[i] = own.order[i];
        values[i] = own.z[ids[i]];
      }
    } else {
      row_top(z, V, n, ids, values);
      while (n > 0 && !(values[n - 1] > -INFINITY)) n--;
    }
    for (int64_t i = 0; i < n; i++) values[i] = (float)((double)values[i] - m - log_sum);
    PTR(int32_t, 26)[r] = (int32_t)n;
  }
}

/* Log-probabilities under softmax(logits) of one target per row, its rank, and the best n.
 * a: 0 R | 1 logits float[R, V] | 2 V | 3 target int32[R] | 4 top_n int32[R] | 5 out logprob float[R]
 *    | 6 out rank int32[R], 1 for the best | 7 out top_ids int32[R, N] | 8 out top_logprobs float[R, N] | 9 N.
 * Entries from top_n[r] on are not written; a target outside [0, V) gives -inf and rank 0. */
EXPORT void oct_logprobs(const int64_t *a) {
  const int64_t R = a[0], V = a[2], N = a[9];
#pragma omp for schedule(dynamic, 1)
  for (int64_t r = 0; r < R; r++) {
    const float *x = PTR(const float, 1) + r * V;
    const int64_t target = PTR(const int32_t, 3)[r];
    int64_t n = PTR(const int32_t, 4)[r];
    int bad;
    const float m = row_max(x, V, &bad);
    const double log_sum = row_log_sum(x, V, m);
    const int known = target >= 0 && target < V;
    PTR(float, 5)[r] = known ? (float)((double)x[target] - m - log_sum) : -INFINITY;
    PTR(int32_t, 6)[r] = known ? (int32_t)row_rank(x, V, x[target]) : 0;
    if (n > N) n = N;
    if (n <= 0) continue;
    float *values = PTR(float, 8) + r * N;
    row_top(x, V, n, PTR(int32_t, 7) + r * N, values);
    for (int64_t i = 0; i < n; i++) values[i] = (float)((double)values[i] - m - log_sum);
  }
}
