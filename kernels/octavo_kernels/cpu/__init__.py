"""Compiled CPU kernels: C sources, built once per machine with gcc and called through ctypes."""
