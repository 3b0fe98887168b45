"""PTX carried out by a few lines of numpy: the interpreter cannot run it.

What an instruction does is from the PTX ISA. Registers hold any number of threads' words.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

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


def halves(operation: Callable[..., npt.NDArray[np.float16]]) -> Callable[..., Words]:
    def apply(*words: Words) -> Words:
        return operation(*(word.view(np.float16) for word in words)).view(np.uint32)

    return apply


def bfloats(words: Words) -> torch.Tensor:
    """The two bfloat16 of each word, in float32, the less significant first."""
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16).float()


def words_of(values: torch.Tensor) -> Words:
    """Inverse of ``bfloats``."""
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "shr.u32": np.right_shift,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.f16x2": halves(lambda a, b, c: a * b + c),
    "fma.rn.bf16x2": lambda a, b, c: words_of(bfloats(a) * bfloats(b) + bfloats(c)),
    "mul.rn.f16x2": halves(np.multiply),
    "sub.rn.f16x2": halves(np.subtract),
}


def carry_out(ptx: str, outputs: int, *inputs: Words) -> list[Words]:
    """The first ``outputs`` registers ($0, ...) after the block, from ``inputs`` in those that follow."""
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}

    def value(operand: str) -> Words:
        return registers[operand] if operand in registers else np.full_like(inputs[0], int(operand, 0))

    for line in re.sub(r"[{}]", "", ptx).split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and name != ".reg":
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = INSTRUCTIONS[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(outputs)]
