"""GPU kernels in Triton. ``docs/kernels.md`` has what they cost; every one has a torch reference and a test against it."""
