"""Compiling the kernels for GPUs that are not there, and reading what became of them.

The kernels' own launchers are called, on tensors without memory; each launch is compiled for a target and not run. So what is
checked is what would be launched: the same types, constants, alignments, warps and stages.
"""
