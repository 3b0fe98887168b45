"""What happens between a plan and the first layer, in plain torch: differences written, inputs read off the tables."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.interface import StepRows


class PlainInputs:
    """This part of ``Kernels``, for backends whose memory is the host's."""

    @staticmethod
    def write_rows(table: Tensor, segments: Tensor, words: Tensor, longest: int) -> None:
        """As ``Kernels.write_rows``."""
        for row, column, source, length in segments.tolist():
            table[row, column : column + length] = words[source : source + length]

    @staticmethod
    def put_tokens(table: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """As ``Kernels.put_tokens``."""
        table[rows.long(), columns.long()] = tokens

    @staticmethod
    def prepare_inputs(
        rows: StepRows, block_size: int, ids: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor
    ) -> None:
        """As ``Kernels.prepare_inputs``."""
        count = int(rows.num_rows[0])
        starts, which = rows.starts[:count], rows.slots[:count].long()
        queries = rows.query_start[1 : count + 1] - rows.query_start[:count]
        total = int(queries.sum())
        first = torch.repeat_interleave(starts - rows.query_start[:count], queries.long())
        owner = torch.repeat_interleave(which, queries.long())
        at = first + torch.arange(total, dtype=torch.int32)
        ids[:total] = rows.tokens[owner, at.long()]
        positions[:total] = at
        slots[:total] = rows.tables[owner, (at // block_size).long()] * block_size + at % block_size
        ids[total:], positions[total:], slots[total:] = -1, 0, -1
        for r, (slot, length) in enumerate(zip(which.tolist(), (starts + queries).tolist(), strict=True)):
            pages = -(-length // block_size)
            block_tables[r, :pages] = rows.tables[slot, :pages]
