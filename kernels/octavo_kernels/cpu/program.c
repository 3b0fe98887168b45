/* Runs recorded programs: `count` kernels, each with its own arguments, inside one parallel region. */
#include "common.h"
#include <omp.h>

typedef void (*kernel)(const int64_t *);

/* ops int64[count][stride]: column 0 the kernel's address, the rest its arguments. */
EXPORT void oct_run(const int64_t *ops, int64_t count, int64_t stride, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
  for (int64_t i = 0; i < count; i++) {
    const int64_t *op = ops + i * stride;
    ((kernel)(intptr_t)op[0])(op + 1);
  }
}
