"""Pages moved between places of one memory, or between a device's and the host's pinned memory, over all layers at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words of a program: 8 KiB, four loads of 16 bytes in flight for each thread of four warps.
WORDS = 2048


@triton.jit
def move_pages_kernel(
    source_ptr,  # int32[layers, blocks, words], layers and pages at the distances given
    source_index_ptr,  # int32[moves]
    destination_ptr,  # int32[layers, other blocks, words]
    destination_index_ptr,  # int32[moves]
    words,  # of a page of a layer
    source_layer_stride,
    source_page_stride,
    destination_layer_stride,
    destination_page_stride,
    WORDS: tl.constexpr,
):
    """Programs (moves * pieces of a page, layers). Offsets take 64 bits: pools are larger than 2**31 words."""
    pieces = tl.cdiv(words, WORDS)
    move = tl.program_id(0) // pieces
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(source_index_ptr + move).to(tl.int64)
    destination = tl.load(destination_index_ptr + move).to(tl.int64)
    source_ptr += layer * source_layer_stride + source * source_page_stride
    destination_ptr += layer * destination_layer_stride + destination * destination_page_stride
    word = tl.program_id(0) % pieces * WORDS + tl.arange(0, WORDS)
    tl.store(destination_ptr + word, tl.load(source_ptr + word, word < words), word < words)


def _in_words(pages: Tensor) -> Tensor:
    """Pages [layers, blocks, ...] as int32[layers, blocks, words].

    Raises:
        ValueError: a page is not contiguous, or not whole words.
    """
    if not pages[0, 0].is_contiguous() or pages[0, 0].nbytes % 4:
        raise ValueError(f"pages {tuple(pages.shape)} of {pages.dtype} are not whole words in one piece")
    return pages.flatten(2).view(torch.int32)


def move_pages(source_pages: Tensor, source: Tensor, destination_pages: Tensor, destination: Tensor) -> None:
    """As ``Kernels.move_pages``. Indices lie on the device; pinned host memory is read and written where it is.

    Raises:
        ValueError: pages of different sizes or types, or not in one piece.
    """
    if source_pages.dtype != destination_pages.dtype or source_pages.shape[0] != destination_pages.shape[0]:
        raise ValueError(f"pages {tuple(source_pages.shape)} do not fit pages {tuple(destination_pages.shape)}")
    from_words, to_words = _in_words(source_pages), _in_words(destination_pages)
    words = from_words.shape[2]
    if to_words.shape[2] != words:
        raise ValueError(f"pages {tuple(source_pages.shape)} do not fit pages {tuple(destination_pages.shape)}")
    if not len(source):
        return
    move_pages_kernel[len(source) * triton.cdiv(words, WORDS), from_words.shape[0]](
        from_words,
        source,
        to_words,
        destination,
        words,
        from_words.stride(0),
        from_words.stride(1),
        to_words.stride(0),
        to_words.stride(1),
        WORDS=WORDS,
        num_warps=4,
    )


def copy_pages(pages: Tensor, source: Tensor, destination: Tensor) -> None:
    """As ``Kernels.copy_pages``."""
    move_pages(pages, source, pages, destination)
