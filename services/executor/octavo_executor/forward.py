"""The way of a step's rows through the layers: inputs filled in by the host or read off the device's tables, graphs replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from octavo_executor.batch import BatchState
from octavo_executor.device import Device, Work
from octavo_executor.graphs import DecodeGraphs
from octavo_executor.lanes import Lane
from octavo_executor.model import Transformer
from octavo_executor.step_work import HiddenRows, Launched, Rows
from octavo_executor.tables import DeviceTables
from octavo_kernels import Kernels, StepBounds, StepRows

Ints = npt.NDArray[np.int32]


class StepForward:
    """Owns the graphs; fills the model's inputs."""

    def __init__(self, model: Transformer, kernels: Kernels, state: BatchState, tables: DeviceTables) -> None:
        self._model, self._kernels, self._state, self._tables = model, kernels, state, tables
        self._device: Device = model.device
        self._block_size = state.block_size
        self._graphs = DecodeGraphs(self._device)

    def capture(self, sizes: Iterable[int], progress: Callable[[float], None] | None) -> None:
        """Capture steps of decodes with each of ``sizes`` rows."""
        fitting = [size for size in sizes if size <= min(self._model.max_logits, self._state.num_slots)]
        # A step of no rows: all of them are padding, and no page is touched.
        self._model.inputs.batch.num_seqs.zero_()
        self._model.inputs.batch.query_start.zero_()
        with torch.inference_mode():
            self._device.synchronize()
            self._graphs.capture(fitting, self._decode_step, progress)
        self._device.synchronize()

    def plan(self, step: Launched) -> tuple[Work | None, bool]:
        """What runs the layers, and whether logits come with it."""
        rows, num_tokens = step.rows, step.rows.num_tokens
        if not num_tokens:
            return None, False
        if self._device.host_memory:
            self._fill_inputs(rows)
            return lambda: self._forward(num_tokens, None), False
        graph = self._graphs.fitting(len(rows.slots)) if self._is_decode(step) else None
        self._fill_header(step, len(rows.slots) if graph is None else graph[0])
        if graph is not None:
            return graph[1], True
        count, longest = len(rows.slots), int((rows.starts + rows.counts).max())
        bounds = StepBounds(count, int(rows.counts.max()), longest)
        return lambda: self._prepare_and_forward(count, num_tokens, bounds), False

    @staticmethod
    def _is_decode(step: Launched) -> bool:
        """Every row computes one token and draws the next: row r of the logits is that of row r."""
        count, samples = len(step.rows.slots), step.samples
        plain = step.rows.num_tokens == count == len(samples.slots) == samples.num_draws and not step.prompts
        return plain and bool((samples.row_of == np.arange(count)).all())

    def _decode_step(self, size: int) -> Work:
        """A step of ``size`` decodes, as it is captured."""
        bounds = StepBounds(size, 1, self._state.max_model_len)

        def work() -> None:
            self._prepare_and_forward(size, size, bounds)
            self._model.logits(size)

        return work

    def _prepare_and_forward(self, count: int, num_tokens: int, bounds: StepBounds) -> None:
        inputs = self._model.inputs
        rows = StepRows(
            inputs.batch.num_seqs,
            inputs.row_slots[:count],
            inputs.row_starts[:count],
            inputs.batch.query_start[: count + 1],
            self._tables.tokens,
            self._tables.pages,
        )
        built = (inputs.ids[:num_tokens], inputs.positions[:num_tokens], inputs.slots[:num_tokens])
        self._kernels.prepare_inputs(rows, self._block_size, *built, inputs.batch.block_tables)
        self._forward(num_tokens, bounds)

    def _forward(self, num_tokens: int, bounds: StepBounds | None) -> None:
        self._kernels.start_step()
        self._model.forward(num_tokens, bounds)

    def _fill_header(self, step: Launched, size: int) -> None:
        """What the host knows of the rows, padded to ``size`` rows."""
        rows, count = step.rows, len(step.rows.slots)
        assert step.lane.header is not None
        number, slots, starts, query_start, seq_lens = self._model.inputs.columns(step.lane.header)
        number[0] = count
        slots[:count], starts[:count] = rows.slots, rows.starts
        query_start[: count + 1], query_start[count + 1 : size + 1] = rows.query_start, rows.num_tokens
        seq_lens[:count], seq_lens[count:size] = rows.starts + rows.counts, 0

    def _fill_inputs(self, rows: Rows) -> None:
        state, inputs, count, block = self._state, self._model.inputs, len(rows.slots), self._block_size
        total = int(rows.query_start[-1])
        inputs.np_num_seqs[0] = count
        lengths = rows.starts + rows.counts
        inputs.np_query_start[: count + 1] = rows.query_start
        inputs.np_seq_lens[:count] = lengths
        width = -(-int(lengths.max()) // block)
        inputs.np_block_tables[:count, :width] = state.tables[rows.slots, :width]
        if total == count:
            slot, position = rows.slots, rows.starts
        else:
            slot = np.repeat(rows.slots, rows.counts)
            position = np.arange(total, dtype=np.int32) + np.repeat(rows.starts - rows.query_start[:-1], rows.counts)
        inputs.np_ids[:total] = state.tokens[slot, position]
        inputs.np_positions[:total] = position
        inputs.np_slots[:total] = state.tables[slot, position // block] * block + position % block

    def hidden(self, rows: Ints, lane: Lane) -> HiddenRows:
        return HiddenRows(rows, None if self._device.host_memory else lane.uploads.put(rows))

    def logits(self, hidden: HiddenRows) -> Work:
        model, count = self._model, len(hidden.rows)

        def work() -> None:
            if hidden.index is None:
                model.inputs.np_logits_index[:count] = hidden.rows
            model.logits(count, hidden.index)

        return work
