"""Differences into tables and inputs off them: the reference against plain Python, the GPU's kernels against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo_kernels import StepRows, choose_kernels
from octavo_kernels.interface import Kernels
from octavo_kernels.triton import batch

BLOCK = 8


@pytest.fixture(scope="module", params=["reference", "cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param, head_dim=16, block_size=BLOCK, max_tokens=64, max_seqs=8)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_pieces_of_any_length_are_written(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "BLOCK", 16)
    table, words = torch.zeros(4, 50, dtype=torch.int32), torch.arange(100, 200, dtype=torch.int32)
    segments = [(0, 3, 5, 1), (3, 0, 10, 50), (1, 7, 60, 16), (1, 23, 80, 17), (2, 0, 0, 0)]
    expected = table.clone()
    for row, column, source, length in segments:
        expected[row, column : column + length] = words[source : source + length]
    kernels.write_rows(table, torch.tensor(segments, dtype=torch.int32), words, 50)
    assert torch.equal(table, expected)
    kernels.write_rows(table, torch.zeros(0, 4, dtype=torch.int32), words, 0)
    assert torch.equal(table, expected)


def test_tokens_are_put(kernels: Kernels) -> None:
    table = torch.zeros(3, 9, dtype=torch.int32)
    kernels.put_tokens(table, ints(2, 0), ints(8, 4), ints(-1, 77))
    assert torch.nonzero(table).tolist() == [[0, 4], [2, 8]]
    assert (table[0, 4], table[2, 8]) == (77, -1)


@pytest.mark.parametrize(
    ("rows", "room", "padding"),
    [
        # (slot, start, tokens) each.
        ([(2, 0, 1)], 1, 0),
        ([(4, 7, 1), (0, 8, 1), (1, 31, 1)], 4, 1),
        ([(3, 6, 20), (1, 0, 9), (0, 17, 1)], 8, 0),
        ([], 2, 2),
    ],
)
def test_inputs_are_read_off_the_tables(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int, int]], room: int, padding: int
) -> None:
    monkeypatch.setattr(batch, "BLOCK", 16)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 1000, (5, 40), generator=generator, dtype=torch.int32)
    tables = torch.randint(0, 1000, (5, 5), generator=generator, dtype=torch.int32)
    starts = [0]
    for _, _, count in rows:
        starts.append(starts[-1] + count)
    total = starts[-1]
    spare = room - len(rows)
    step = StepRows(
        ints(len(rows)),
        ints(*(slot for slot, _, _ in rows), *[2**30] * spare),
        ints(*(start for _, start, _ in rows), *[2**30] * spare),
        ints(*starts, *[2**30] * spare),
        tokens,
        tables,
    )
    ids, positions, slots = (torch.full((total + padding,), 2**29, dtype=torch.int32) for _ in range(3))
    block_tables = torch.full((room, 5), -5, dtype=torch.int32)
    kernels.prepare_inputs(step, BLOCK, ids, positions, slots, block_tables)
    where = [(slot, start + i) for slot, start, count in rows for i in range(count)]
    assert ids.tolist() == [int(tokens[slot, at]) for slot, at in where] + [-1] * padding
    assert positions.tolist() == [at for _, at in where] + [0] * padding
    assert (
        slots.tolist() == [int(tables[slot, at // BLOCK]) * BLOCK + at % BLOCK for slot, at in where] + [-1] * padding
    )
    for r, (slot, start, count) in enumerate(rows):
        pages = -(-(start + count) // BLOCK)
        assert block_tables[r].tolist() == tables[slot, :pages].tolist() + [-5] * (5 - pages)
    assert (block_tables[len(rows) :] == -5).all()
