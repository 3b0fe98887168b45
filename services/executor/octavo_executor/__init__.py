"""The executor: weights, KV pages, the forward pass, sampling, and publishing tokens."""

import os

# A forward pass has hundreds of short parallel regions. By default a thread that waits for the others at the end of one
# spins for about a millisecond; on a machine that is also doing something else, it so keeps from the core the very thread
# it waits for. This must be set before the OpenMP runtime is loaded, hence before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
