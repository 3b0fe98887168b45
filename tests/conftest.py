"""For every test: GPU kernels are run by Triton's interpreter, and threads that wait for each other sleep."""

import os

# Triton's decorators look at this once, when Triton is first imported, which may be long before the kernels' own tests:
# transformers does it too.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Test processes that share the cores would spin against each other (libgomp's default).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
