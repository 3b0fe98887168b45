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
    def has_wide_products(self) -> bool:
        """Whether matrix products read their operands from shared memory (wgmma, tcgen05)."""
        return self.nvidia and int(self.arch[3:]) in range(90, 110)


@dataclass(frozen=True, slots=True)
class Tiles:
    """``small_m`` and ``block_m`` rows by ``block_n`` keys, computed by ``warps`` warps, loads ``stages`` deep."""

    small_m: int
    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Splits in keys (0: never split). ``programs`` is the second axis of the grid."""

    tiles: Tiles
    tile_queries: int
    small_queries: int
    small_split: int
    large_split: int
    programs: int

    @property
    def splits(self) -> bool:
        """Whether a reduction follows."""
        return self.small_split > 0 or self.large_split > 0

    @property
    def cut(self) -> tuple[int, ...]:
        """What the work list depends on."""
        return self.tile_queries, self.small_queries, self.small_split, self.large_split, self.tiles.block_n


def power_of_two(n: int) -> int:
    """The smallest one that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def _stages(gpu: Gpu, bytes_per_stage: int, fixed_bytes: int, wanted: int) -> int:
    """Loads in flight that fit into shared memory: ``stages`` of the compiler are one more than its buffers."""
    fitting = (gpu.shared_bytes - fixed_bytes) // bytes_per_stage
    return max(2, min(wanted, fitting + 1))


def choose_tiles(shape: AttentionShape, dtype: torch.dtype, page_dtype: torch.dtype, rows: int, gpu: Gpu) -> Tiles:
    """Tiles for sequences with at most ``rows`` rows (queries times heads of a group).

    Up to 16 rows, that is decodes, the time is that of reading keys and values: the tile is as small as matrix units take
    it, and loads go deep. Above, tiles are as large as registers allow.
    """
    group = shape.num_heads // shape.num_kv_heads
    width = power_of_two(shape.head_dim)
    small = max(16, power_of_two(group))
    key_bytes = 2 * width * page_dtype.itemsize
    if rows <= small:
        keys = 64 if width <= 128 else 32
        return Tiles(small, small, keys, 4, _stages(gpu, keys * key_bytes, 8192, 4))
    wide = dtype.itemsize == 4
    block_m = max(small, 64 if wide or width > 128 else 128)
    keys = 32 if wide or width > 128 else 64
    warps = 8 if block_m * width >= 128 * 128 and not wide else 4
    q_bytes = block_m * width * dtype.itemsize
    return Tiles(small, block_m, keys, warps, _stages(gpu, keys * key_bytes, q_bytes + 4096, 3))


def choose_attention(
    shape: AttentionShape,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    batch: AttentionBatch,
    num_tokens: int,
    gpu: Gpu,
    split_keys: int = SPLIT_KEYS,
) -> AttentionLaunch:
    """The launch for a step of ``num_tokens`` query rows, whose activations have ``dtype`` and pages ``page_dtype``.

    Without ``batch.bounds`` it suits any step that the batch's tensors can describe. Tiles of many queries, which have as
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
    tiles = choose_tiles(shape, dtype, page_dtype, max_queries * group, gpu)
    tile_queries = tiles.block_m // group
    num_tiles = num_seqs + num_tokens // tile_queries
    small_split = split_keys if max_keys > split_keys else 0
    few = num_tiles * shape.num_kv_heads < gpu.multiprocessors
    large_split = 8 * split_keys if few and max_keys > 8 * split_keys else 0
    entries = num_tiles * (-(-max_keys // split_keys) if small_split else 1)
    places = ROUNDS * gpu.multiprocessors * (3 if tiles.block_m == tiles.small_m else 1)
    programs = max(1, min(entries, -(-places // shape.num_kv_heads)))
    return AttentionLaunch(tiles, tile_queries, tiles.small_m // group, small_split, large_split, programs)
