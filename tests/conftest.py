"""For every test: GPU kernels are run by Triton's interpreter. Its decorators look at this once, when Triton is first imported,
which may be long before the kernels' own tests: transformers does it too."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
