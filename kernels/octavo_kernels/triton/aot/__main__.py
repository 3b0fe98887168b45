"""``python -m octavo_kernels.triton.aot``."""

import sys

from octavo_kernels.triton.aot.check import main

if __name__ == "__main__":
    sys.exit(main())
