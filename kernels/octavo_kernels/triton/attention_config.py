"""How attention is launched: tile sizes, splits and the number of programs, from what the host knows without asking the device.

A few rules instead of autotuning: a launch is the same from run to run, nothing is timed at start, and a table in a test
says what is chosen. The figures behind the rules (registers, shared memory, spills) are in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo_kernels.interface import AttentionBatch, AttentionShape

# Keys of a part of a split range. A constant, not a function of the batch: the order in which a sequence's keys are added
# up then depends on that sequence alone. 512 keys of 128 elements are 256 KiB of bfloat16 for a key head, hundreds of times
# the partial sums they cost; two sequences of 8k keys already fill an H200.
SPLIT_KEYS = 512
# Programs per place where one can run. More would balance better, but programs that find nothing to do cost time too.
ROUNDS = 4
# Blocks of small tiles that a multiprocessor runs at once, about.
SMALL_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the rules know of a device: its architecture ("sm_90", "gfx942"), multiprocessors, shared memory of a block."""

    arch: str
    multiprocessors: int
    shared_bytes: int

    @property
    def nvidia(self) -> bool:
        """Whether it is one of NVIDIA's."""
        return self.arch.startswith("sm_")

    @property
    def knows_e4m3(self) -> bool:
        """Whether e4m3 is a type of the hardware. AMD's before gfx950 have another one of the same name."""
        return self.nvidia and int(self.arch[3:]) >= 89

    @property
    def has_tensor_memory(self) -> bool:
        """Whether large matrix products are tcgen05's."""
        return self.nvidia and int(self.arch[3:]) in range(100, 110)


@dataclass(frozen=True, slots=True)
class Tiles:
    """``block_m`` rows by ``block_n`` keys, computed by ``warps`` warps, loads ``stages`` deep.

    ``registers``: at most so many a thread; None: what the compiler likes.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """A launch for small tiles, and if there may be sequences of more queries one for ``large`` ones.

    Splits in keys (0: never split); programs are the second axis of a grid.
    """

    small: Tiles
    large: Tiles | None
    group: int  # query heads of a key head
    small_split: int
    large_split: int
    small_programs: int
    large_programs: int

    @property
    def splits(self) -> bool:
        """Whether a reduction follows."""
        return self.small_split > 0 or self.large_split > 0

    @property
    def cut(self) -> tuple[int, ...]:
        """What the work lists depend on: queries of a large and of a small tile, the splits, keys of a tile."""
        large = self.large or self.small
        queries = large.block_m // self.group, self.small.block_m // self.group
        return *queries, self.small_split, self.large_split, self.small.block_n, large.block_n


def power_of_two(n: int) -> int:
    """The smallest one that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def _stages(gpu: Gpu, bytes_per_stage: int, fixed_bytes: int, wanted: int) -> int:
    """Loads in flight that fit into shared memory: ``stages`` of the compiler are one more than its buffers."""
    fitting = (gpu.shared_bytes - fixed_bytes) // bytes_per_stage
    return max(2, min(wanted, fitting + 1))


def small_tiles(shape: AttentionShape, page_dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """Tiles for sequences of few rows (queries times heads of a group), decodes above all.

    The time is that of reading keys and values: a tile is as small as matrix units take it, and what counts are bytes on their
    way. A multiprocessor of an H200 must keep 36 KB of loads in flight (4.8 TB/s for about a microsecond); two or three buffers
    in each of three or four blocks keep at least that even while every block computes.
    """
    width = power_of_two(shape.head_dim)
    keys, warps = (64 if width <= 128 else 32), 4
    if page_dtype.itemsize == 4:
        keys, warps = (16, 8) if width > 128 else (32, 4)
    stage_bytes = keys * 2 * width * page_dtype.itemsize
    stages = _stages(gpu, stage_bytes, 8192, 3 if stage_bytes >= 32768 else 4)
    # Left alone, the compiler settles for 96 registers on Hopper, and spills for a soft cap's sake. Four blocks may have 128.
    registers = 128 if shape.soft_cap and gpu.arch == "sm_90" and page_dtype.itemsize < 4 else None
    return Tiles(small_rows(shape), keys, warps, stages, registers)


def small_rows(shape: AttentionShape) -> int:
    """Rows of a small tile: one query of every head of a group at least."""
    return max(16, power_of_two(shape.num_heads // shape.num_kv_heads))


def large_tiles(shape: AttentionShape, dtype: torch.dtype, page_dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """Tiles for any other sequences, bound by arithmetic: as large as registers allow without spilling any."""
    width = power_of_two(shape.head_dim)
    rows, keys, warps = _large_sizes(width, dtype.itemsize, page_dtype.itemsize, gpu)
    registers = None
    if _runs_in_pairs(shape, dtype, page_dtype, gpu):
        rows, keys, warps, registers = 128, 4096 // width, 8, 128
    elif page_dtype == torch.int8 and shape.head_dim < width == 128 and gpu.has_tensor_memory:
        # Masked loads and scales beside widened numbers are too much for 128 rows: two blocks of 64.
        rows, keys, warps = 64, 64, 4
    rows = max(small_rows(shape), rows)
    fixed_bytes = rows * width * dtype.itemsize + 4096
    # Bytes are widened through registers: another buffer on its way would cost those of a larger tile.
    wanted = 2 if page_dtype.itemsize == 1 else 4 if registers else 3
    stages = _stages(gpu, keys * 2 * width * page_dtype.itemsize, fixed_bytes, wanted)
    return Tiles(rows, keys, warps, stages, registers)


def _runs_in_pairs(shape: AttentionShape, dtype: torch.dtype, page_dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether a multiprocessor runs two blocks at once: one computes weights while the other has the matrix units.

    For that a thread may have 128 registers. Where the compiler cannot do with so many, one block has them all.
    """
    plain = shape.head_dim in (64, 128) and not shape.window and shape.block_size < 32
    return plain and gpu.arch == "sm_90" and dtype.itemsize == page_dtype.itemsize == 2


def _large_sizes(width: int, size: int, page_size: int, gpu: Gpu) -> tuple[int, int, int]:
    """(rows, keys, warps) for heads padded to ``width`` and numbers of so many bytes."""
    if size == 4:
        # Three products for each, of numbers split in two: registers go to those.
        return (16, 16, 8) if width > 128 else (32, 32, 4) if width > 64 else (64, 32, 4)
    if width > 128 and page_size == 1:
        # Widened numbers lie in registers beside those that came, except where sums have a memory of their own.
        return (64, 32, 8) if gpu.has_tensor_memory else (32, 16, 4)
    if width > 128:
        return (32, 32, 4) if gpu.has_tensor_memory else (64, 32, 8)
    if not gpu.nvidia:
        return 128, 32, 4
    return 128, 64, 8 if width > 64 or page_size == 1 else 4


def choose_attention(
    shape: AttentionShape,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    batch: AttentionBatch,
    num_tokens: int,
    gpu: Gpu,
    split_keys: int = SPLIT_KEYS,
) -> AttentionLaunch:
    """The launches for a step of ``num_tokens`` query rows, whose activations have ``dtype`` and pages ``page_dtype``.

    Without ``batch.bounds`` they suit any step that the batch's tensors can describe. Tiles of many queries, which have as
    many sums to store, are split into longer parts, and only where there are too few of them for all multiprocessors.
    """
    group = shape.num_heads // shape.num_kv_heads
    bounds = batch.bounds
    num_seqs = min(batch.query_start.shape[0] - 1, num_tokens)
    max_queries, max_keys = num_tokens, batch.block_tables.shape[1] * shape.block_size
    if bounds is not None:
        num_seqs, max_queries = min(num_seqs, bounds.num_seqs), min(max_queries, bounds.max_queries)
        max_keys = min(max_keys, bounds.max_keys)
    if shape.window:
        max_keys = min(max_keys, shape.window + max_queries - 1)
    small = small_tiles(shape, page_dtype, gpu)
    small_split = split_keys if max_keys > split_keys else 0
    small_entries = num_seqs * (-(-max_keys // split_keys) if small_split else 1)
    small_programs = _programs(small_entries, SMALL_BLOCKS, shape, gpu)
    if max_queries * group <= small.block_m:
        return AttentionLaunch(small, None, group, small_split, 0, small_programs, 0)
    large = large_tiles(shape, dtype, page_dtype, gpu)
    num_tiles = num_seqs + num_tokens // (large.block_m // group)
    few = num_tiles * shape.num_kv_heads < gpu.multiprocessors
    large_split = 8 * split_keys if few and max_keys > 8 * split_keys else 0
    large_entries = num_tiles * (-(-max_keys // large_split) if large_split else 1)
    large_programs = _programs(large_entries, 1, shape, gpu)
    return AttentionLaunch(small, large, group, small_split, large_split, small_programs, large_programs)


def _programs(entries: int, blocks: int, shape: AttentionShape, gpu: Gpu) -> int:
    """Programs of each key head for so many entries, where a multiprocessor runs ``blocks`` at once."""
    places = ROUNDS * gpu.multiprocessors * blocks
    return max(1, min(entries, -(-places // shape.num_kv_heads)))
