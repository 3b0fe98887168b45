"""The transformer: token ids of a mixed batch in, logits of the rows asked for out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_executor.device import CpuDevice, Device
from octavo_executor.kv_cache import KvCache, attention_shape
from octavo_executor.lanes import UPLOAD_WORDS
from octavo_executor.spec import ModelSpec as Spec
from octavo_executor.spec import RopeSpec, UnsupportedModelError
from octavo_executor.weights import DtypePlan, LayerWeights, ModelWeights
from octavo_kernels import AttentionBatch, Kernels, Program, StepBounds

Words = TypeVar("Words", Tensor, npt.NDArray[np.int32])


def rope_frequencies(rope: RopeSpec) -> Tensor:
    """Angular frequencies float32[dim / 2] (Su et al., arXiv 2104.09864), scaled as ``rope.kind`` says.

    "llama3" is the scheme of Llama 3.1 (Grattafiori et al., arXiv 2407.21783).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = rope.original_max_positions / wavelengths
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        slowed = frequencies / rope.factor
        between = (1 - smooth) * slowed + smooth * frequencies
        return torch.where(
            turns < rope.low_freq_factor, slowed, torch.where(turns > rope.high_freq_factor, frequencies, between)
        )
    return frequencies


def rope_table(rope: RopeSpec, positions: int) -> Tensor:
    """[cos | sin] float32[positions, dim]."""
    angles = torch.outer(torch.arange(positions).float(), rope_frequencies(rope))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class StepInputs:
    """The input buffers of a step. They are fixed; whoever builds the batch fills their first entries.

    On a CPU by numpy, which costs less per call: its views (``np_*``) share the tensors' memory. Elsewhere what the host knows
    is one piece, ``header``, which comes with the step's upload, and the rest is read off the device's tables by a kernel.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, max_logits: int, device: Device, staged_words: int = 0
    ) -> None:
        """``staged_words`` follow the header in one piece of memory, for whatever else goes up with a step."""

        def ints(*shape: int) -> Tensor:
            return device.zeros(shape, torch.int32)

        self.max_seqs = max_seqs
        # Four columns of a step's rows behind their number, each in whole sixteens of bytes.
        self._column = -(-(max_seqs + 1) // 4) * 4
        self.header_words = 4 + 4 * self._column
        self.staging = ints(self.header_words + staged_words)
        num_seqs, self.row_slots, self.row_starts, query_start, seq_lens = self.columns(self.staging)
        self.ids, self.positions = ints(max_tokens), ints(max_tokens)
        self.slots = ints(max_tokens).fill_(-1)
        # Where nobody fills it: row r of logits is that of token r, as in a step of decodes.
        self.logits_index = torch.arange(max_logits, dtype=torch.int32, device=device.torch_device)
        self.batch = AttentionBatch(num_seqs, query_start, seq_lens, ints(max_seqs, max_blocks))
        if device.host_memory:
            self.np_ids = self.ids.numpy()
            self.np_positions = self.positions.numpy()
            self.np_slots = self.slots.numpy()
            self.np_logits_index = self.logits_index.numpy()
            self.np_num_seqs = self.batch.num_seqs.numpy()
            self.np_query_start = self.batch.query_start.numpy()
            self.np_seq_lens = self.batch.seq_lens.numpy()
            self.np_block_tables = self.batch.block_tables.numpy()

    def columns(self, words: Words) -> tuple[Words, Words, Words, Words, Words]:
        """The header's parts (of a tensor, or of an array that is its twin): number of rows [1], their slots [S], their first
        positions [S], query_start [S + 1], seq_lens [S]."""
        first = [4 + i * self._column for i in range(4)]
        size = self.max_seqs
        return (
            words[:1],
            words[first[0] : first[0] + size],
            words[first[1] : first[1] + size],
            words[first[2] : first[2] + size + 1],
            words[first[3] : first[3] + size],
        )


class Transformer:
    """Weights, buffers and the order of the kernels. Not thread-safe: one step at a time."""

    def __init__(
        self,
        spec: Spec,
        weights: ModelWeights,
        kernels: Kernels,
        cache: KvCache,
        dtypes: DtypePlan,
        *,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int,
        max_logits: int,
        device: Device | None = None,
    ) -> None:
        """``max_tokens`` and ``max_logits`` bound one call of ``forward`` and of ``logits``. ``device`` is by default the CPU.

        Raises:
            UnsupportedModelError: the spec has a norm or position scheme this transformer lacks.
        """
        if spec.norm != "rms" or spec.positions != "rotary" or spec.rope is None:
            raise UnsupportedModelError(f"{spec.norm} norms with {spec.positions} positions are not supported")
        self.spec = spec
        self.max_tokens, self.max_logits = max_tokens, max_logits
        self._weights, self._kernels, self._cache = weights, kernels, cache
        device = device or CpuDevice()
        self.max_seqs, self.device = max_seqs, device
        self._table = rope_table(spec.rope, max_model_len).to(device.torch_device, torch.float32)
        blocks = -(-max_model_len // cache.block_size)
        self.inputs = StepInputs(
            max_tokens, max_seqs, blocks, max_logits, device, 0 if device.host_memory else UPLOAD_WORDS
        )

        def buffer(width: int, rows: int = max_tokens, dtype: torch.dtype = dtypes.activations) -> Tensor:
            return device.zeros((rows, width), dtype)

        heads = spec.num_heads + 2 * spec.num_kv_heads
        self._residual, self._x, self._normed = (buffer(spec.hidden_size) for _ in range(3))
        self._qkv = buffer(heads * spec.head_dim)
        self._attended = buffer(spec.num_heads * spec.head_dim)
        self._gate_up = buffer(2 * spec.intermediate_size)
        self._activated = buffer(spec.intermediate_size)
        self._last = buffer(spec.hidden_size, max_logits)
        self._logits = buffer(spec.vocab_size, max_logits, torch.float32)
        self._body: Program | None = None
        self._head: Program | None = None
        recording = kernels.record()
        if recording is not None:
            with torch.inference_mode():
                with recording as finish:
                    self._issue_body(max_tokens)
                self._body = finish()
                head = kernels.record()
                assert head is not None
                with head as finish:
                    self._issue_head(max_logits)
                self._head = finish()

    def forward(self, num_tokens: int, bounds: StepBounds | None = None) -> None:
        """Run all layers over the first ``num_tokens`` entries of ``inputs``; keys and values go to their pages.

        ``bounds`` tell a backend that cannot look into the inputs what it may rely on.
        """
        if not 0 <= num_tokens <= self.max_tokens:
            raise ValueError(f"{num_tokens} tokens in a step of at most {self.max_tokens}")
        if self._body is not None:
            self._body.run(num_tokens)
            return
        with torch.inference_mode():
            self._issue_body(num_tokens, bounds)

    def logits(self, num_rows: int, index: Tensor | None = None) -> Tensor:
        """Logits float32[num_rows, V] of the rows ``index`` int32[num_rows], or of those in ``inputs.logits_index``;
        overwritten by the next call."""
        if not 0 <= num_rows <= self.max_logits:
            raise ValueError(f"logits of {num_rows} rows, of at most {self.max_logits}")
        if self._head is not None and index is None:
            self._head.run(num_rows)
        else:
            with torch.inference_mode():
                self._issue_head(num_rows, index)
        return self._logits[:num_rows]

    def last_logits(self, num_rows: int) -> Tensor:
        """What the last call of ``logits`` returned, or a replayed graph computed."""
        return self._logits[:num_rows]

    def _issue_body(self, rows: int, bounds: StepBounds | None = None) -> None:
        kernels, residual, x, normed = self._kernels, self._residual[:rows], self._x[:rows], self._normed[:rows]
        batch = self.inputs.batch if bounds is None else replace(self.inputs.batch, bounds=bounds)
        kernels.embed(self.inputs.ids[:rows], self._weights.embedding, residual)
        for i, layer in enumerate(self._weights.layers):
            if i == 0:
                kernels.rms_norm(residual, layer.input_norm, self.spec.norm_eps, normed)
            else:
                kernels.add_rms_norm(x, residual, layer.input_norm, self.spec.norm_eps, normed)
            self._issue_attention(i, layer, rows, batch)
            kernels.add_rms_norm(x, residual, layer.mlp_norm, self.spec.norm_eps, normed)
            gate_up, activated = self._gate_up[:rows], self._activated[:rows]
            kernels.linear(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            kernels.act_and_mul(gate_up, self.spec.activation, activated)
            kernels.linear(activated, layer.down, layer.down_bias, x)

    def _issue_attention(self, index: int, layer: LayerWeights, rows: int, batch: AttentionBatch) -> None:
        spec, kernels, inputs = self.spec, self._kernels, self.inputs
        qkv, attended = self._qkv[:rows], self._attended[:rows]
        k_pages, v_pages = self._cache.k[index], self._cache.v[index]
        shape, extras = attention_shape(spec, self._cache.block_size, index), self._cache.extras(index)
        kernels.linear(self._normed[:rows], layer.qkv, layer.qkv_bias, qkv)
        kernels.rope_kv(
            qkv,
            inputs.positions[:rows],
            self._table,
            layer.q_norm,
            layer.k_norm,
            spec.norm_eps,
            inputs.slots[:rows],
            k_pages,
            v_pages,
            shape,
            extras,
        )
        kernels.attention(qkv, k_pages, v_pages, batch, shape, attended, extras)
        kernels.linear(attended, layer.output, layer.output_bias, self._x[:rows])

    def _issue_head(self, rows: int, index: Tensor | None = None) -> None:
        last = self._last[:rows]
        index = self.inputs.logits_index[:rows] if index is None else index
        self._kernels.gather_add_rms_norm(self._x, self._residual, index, self._weights.norm, self.spec.norm_eps, last)
        self._kernels.linear(last, self._weights.head, None, self._logits[:rows])
