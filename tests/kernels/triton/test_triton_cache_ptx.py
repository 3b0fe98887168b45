"""The PTX that widens bytes, carried out on the host. Of the instructions that convert e4m3 by hardware only the order can
be checked.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_words import bfloats, carry_out, words_of

from octavo_kernels.triton import int4, quant


@pytest.mark.parametrize(("block", "dtype"), [("_E4M3_BY_BITS", torch.float8_e4m3fn), ("_INT8", torch.int8)])
def test_every_byte_in_every_place(block: str, dtype: torch.dtype) -> None:
    finite = [code for code in range(256) if dtype == torch.int8 or code & 127 != 127]
    rng = np.random.default_rng(0)
    codes = np.concatenate([np.resize(rng.permutation(finite), 256) for _ in range(4)]).astype(np.uint8)
    for place in range(4):
        moved = np.roll(codes, place)
        low, high = carry_out(getattr(quant, block).value, 2, moved.view(np.uint32))
        got = np.stack([low.view(np.float16).reshape(-1, 2), high.view(np.float16).reshape(-1, 2)], 1).reshape(-1)
        expected = torch.from_numpy(moved.copy()).view(dtype).to(torch.float16).numpy()
        assert np.array_equal(got, expected)


def test_hardware_converts_the_lower_two_bytes_first() -> None:
    lines = [line.split() for line in quant._E4M3_BY_HARDWARE.value.split(";")]
    assert ["mov.b32", "{low,", "high},", "$2"] in lines  # the first of a list is the less significant
    converted = [line[1:] for line in lines if line and line[0].startswith("cvt")]
    assert converted == [["$0,", "low"], ["$1,", "high"]]


@pytest.mark.parametrize("zero", [0, 1, 7, 8, 15, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pair_of_codes_in_every_place(dtype: torch.dtype, zero: int) -> None:
    """A register of four bytes becomes those of its low and of its high codes, less the zero."""
    codes = np.concatenate([np.random.default_rng(i).permutation(256) for i in range(4)]).astype(np.uint8)
    words = codes.view(np.uint32)
    if dtype == torch.float16:
        bias = np.full(2 * len(words), -1024 - zero, np.float16).view(np.uint32)
        parts = carry_out(int4._TO_FLOAT16.value, 4, words, bias, bias)
        values = [part.view(np.float16).astype(np.float32) for part in parts]
    else:
        bias = words_of(torch.full((2 * len(words),), -128.0 - zero))
        values = [bfloats(part).numpy() for part in carry_out(int4._TO_BFLOAT16.value, 4, words, bias, bias)]
    for got, expected in ((values[:2], codes & 15), (values[2:], codes >> 4)):
        joined = np.stack([half.reshape(-1, 2) for half in got], 1).reshape(-1)
        assert np.array_equal(joined, expected.astype(np.float32) - zero)
