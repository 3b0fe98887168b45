"""Pages copied within a memory and moved between two of them."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.reference.backend import ReferenceKernels
from octavo_kernels.triton.pages import copy_pages, move_pages

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8


def pages_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 50).to(dtype)


# 640 numbers are less than a program's, 5,120 float32 more than two programs' and no multiple of them.
@pytest.mark.parametrize(("dtype", "page"), [(F32, (2, 16, 20)), (BF16, (2, 16, 20)), (I8, (640,)), (F32, (4, 16, 80))])
def test_copy_pages(dtype: torch.dtype, page: tuple[int, ...]) -> None:
    pages = pages_of(dtype, 2, 6, *page)
    source, destination = torch.tensor([0, 0, 5], dtype=torch.int32), torch.tensor([1, 3, 2], dtype=torch.int32)
    mine, theirs = pages.clone(), pages.clone()
    copy_pages(mine, source, destination)
    ReferenceKernels().copy_pages(theirs, source, destination)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine[:, [0, 4, 5]], pages[:, [0, 4, 5]])


@pytest.mark.parametrize("outwards", [True, False])
def test_move_pages_between_memories(outwards: bool) -> None:
    """One side by layer, the other by page, each page one piece, as the two tiers lie."""
    device, host = pages_of(BF16, 3, 6, 2, 8, 16), pages_of(BF16, 4, 2, 3, 256)
    first, second = torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32)
    results = []
    for move in (move_pages, ReferenceKernels().move_pages):
        mine, theirs = device.clone(), host.clone()
        sides = (mine.flatten(2), theirs[:, 1].transpose(0, 1))
        if outwards:
            move(sides[0], first, sides[1], second)
        else:
            move(sides[1], second, sides[0], first)
        results.append((mine, theirs))
    (mine, theirs), (expected_mine, expected_theirs) = results
    assert torch.equal(mine, expected_mine)
    assert torch.equal(theirs, expected_theirs)
    assert torch.equal(theirs[:, 0], host[:, 0])
    assert torch.equal(mine, device) != torch.equal(theirs, host)


def test_no_moves_are_no_launch() -> None:
    pages, none = torch.zeros(2, 4, 16), torch.zeros(0, dtype=torch.int32)
    copy_pages(pages, none, none)
    assert not pages.any()


def test_pages_that_do_not_fit_are_not_moved() -> None:
    pages, one = torch.zeros(2, 4, 16), torch.zeros(1, dtype=torch.int32)
    for other in (torch.zeros(2, 4, 8), torch.zeros(3, 4, 16), pages.double()):
        with pytest.raises(ValueError, match="do not fit"):
            move_pages(pages, one, other, one)
    for odd in (torch.zeros(2, 4, 32)[..., ::2], torch.zeros((2, 4, 6), dtype=I8)):
        with pytest.raises(ValueError, match="whole words"):
            move_pages(odd, one, odd, one)
