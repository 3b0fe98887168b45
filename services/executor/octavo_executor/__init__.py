"""The executor: weights, pages, the forward pass, sampling, and tokens into the log."""

import os

# Threads that wait for each other at the end of a kernel spin this often before they sleep. By default they spin for
# milliseconds, and on a machine whose cores are shared (with the other services, say) a spinning thread keeps the one it
# waits for off its core: steps then take several times as long. Must be set before torch loads its OpenMP runtime.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
