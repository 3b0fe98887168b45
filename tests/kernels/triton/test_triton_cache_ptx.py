"""The PTX that widens bytes, carried out by a few lines of numpy: the interpreter cannot run it.

What an instruction does is from the PTX ISA; of those that convert e4m3 by hardware there is nothing to check but their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo_kernels.triton import quant

Words = npt.NDArray[np.uint32]


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Byte i of the result is that of {b, a} which digit i of the selector names."""
    both = [(source >> np.uint32(8 * i)) & np.uint32(255) for source in (a, b) for i in range(4)]
    digits = [(int(selector.flat[0]) >> (4 * i)) & 15 for i in range(4)]
    assert max(digits) < 8
    return sum((both[digit] << np.uint32(8 * i) for i, digit in enumerate(digits)), np.zeros_like(a))


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit by bit the entry of the table that the three bits make up."""
    result = np.zeros_like(a)
    for entry in range(8):
        if int(table.flat[0]) >> entry & 1:
            bits = [x if entry >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= bits[0] & bits[1] & bits[2]
    return result


def halves(operation: Callable[..., npt.NDArray[np.float16]]) -> Callable[[Words, Words], Words]:
    def apply(a: Words, b: Words) -> Words:
        return operation(a.view(np.float16), b.view(np.float16)).view(np.uint32)

    return apply


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "shr.u32": np.right_shift,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "mul.rn.f16x2": halves(np.multiply),
    "sub.rn.f16x2": halves(np.subtract),
}


def carry_out(ptx: str, words: Words) -> list[Words]:
    """Registers $0 and $1 after the block, from $2."""
    registers = {"$2": words}

    def value(operand: str) -> Words:
        return registers[operand] if operand in registers else np.full_like(words, int(operand, 0))

    for line in re.sub(r"[{}]", "", ptx).split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and name != ".reg":
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = INSTRUCTIONS[name](*map(value, sources))
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize(("block", "dtype"), [("_E4M3_BY_BITS", torch.float8_e4m3fn), ("_INT8", torch.int8)])
def test_every_byte_in_every_place(block: str, dtype: torch.dtype) -> None:
    finite = [code for code in range(256) if dtype == torch.int8 or code & 127 != 127]
    rng = np.random.default_rng(0)
    codes = np.concatenate([np.resize(rng.permutation(finite), 256) for _ in range(4)]).astype(np.uint8)
    for place in range(4):
        moved = np.roll(codes, place)
        low, high = carry_out(getattr(quant, block).value, moved.view(np.uint32))
        got = np.stack([low.view(np.float16).reshape(-1, 2), high.view(np.float16).reshape(-1, 2)], 1).reshape(-1)
        expected = torch.from_numpy(moved.copy()).view(dtype).to(torch.float16).numpy()
        assert np.array_equal(got, expected)


def test_hardware_converts_the_lower_two_bytes_first() -> None:
    lines = [line.split() for line in quant._E4M3_BY_HARDWARE.value.split(";")]
    assert ["mov.b32", "{low,", "high},", "$2"] in lines  # the first of a list is the less significant
    converted = [line[1:] for line in lines if line and line[0].startswith("cvt")]
    assert converted == [["$0,", "low"], ["$1,", "high"]]
