"""The transformer: token ids of a mixed batch in, logits of the rows asked for out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo_executor.kv_cache import KvCache, attention_shape
from octavo_executor.spec import ModelSpec as Spec
from octavo_executor.spec import RopeSpec, UnsupportedModelError
from octavo_executor.weights import DtypePlan, LayerWeights, ModelWeights
from octavo_kernels import AttentionBatch, Kernels, Program


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

    Numpy views (``np_*``) share the tensors' memory, since filling them by numpy costs less per call.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, max_logits: int) -> None:
        self.ids = torch.zeros(max_tokens, dtype=torch.int32)
        self.positions = torch.zeros(max_tokens, dtype=torch.int32)
        self.slots = torch.full((max_tokens,), -1, dtype=torch.int32)
        self.logits_index = torch.zeros(max_logits, dtype=torch.int32)
        self.batch = AttentionBatch(
            num_seqs=torch.zeros(1, dtype=torch.int32),
            query_start=torch.zeros(max_seqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(max_seqs, dtype=torch.int32),
            block_tables=torch.zeros((max_seqs, max_blocks), dtype=torch.int32),
        )
        self.np_ids = self.ids.numpy()
        self.np_positions = self.positions.numpy()
        self.np_slots = self.slots.numpy()
        self.np_logits_index = self.logits_index.numpy()
        self.np_num_seqs = self.batch.num_seqs.numpy()
        self.np_query_start = self.batch.query_start.numpy()
        self.np_seq_lens = self.batch.seq_lens.numpy()
        self.np_block_tables = self.batch.block_tables.numpy()


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
    ) -> None:
        """``max_tokens`` and ``max_logits`` bound one call of ``forward`` and of ``logits``.

        Raises:
            UnsupportedModelError: the spec has a norm or position scheme this transformer lacks.
        """
        if spec.norm != "rms" or spec.positions != "rotary" or spec.rope is None:
            raise UnsupportedModelError(f"{spec.norm} norms with {spec.positions} positions are not supported")
        self.spec = spec
        self.max_tokens, self.max_logits = max_tokens, max_logits
        self._weights, self._kernels, self._cache = weights, kernels, cache
        self._table = rope_table(spec.rope, max_model_len).to(torch.float32)
        self.inputs = StepInputs(max_tokens, max_seqs, -(-max_model_len // cache.block_size), max_logits)

        def buffer(width: int, rows: int = max_tokens) -> Tensor:
            return torch.zeros((rows, width), dtype=dtypes.activations)

        heads = spec.num_heads + 2 * spec.num_kv_heads
        self._residual, self._x, self._normed = (buffer(spec.hidden_size) for _ in range(3))
        self._qkv = buffer(heads * spec.head_dim)
        self._attended = buffer(spec.num_heads * spec.head_dim)
        self._gate_up = buffer(2 * spec.intermediate_size)
        self._activated = buffer(spec.intermediate_size)
        self._last = buffer(spec.hidden_size, max_logits)
        self._logits = buffer(spec.vocab_size, max_logits)
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

    def forward(self, num_tokens: int) -> None:
        """Run all layers over the first ``num_tokens`` entries of ``inputs``; keys and values go to their pages."""
        if not 0 <= num_tokens <= self.max_tokens:
            raise ValueError(f"{num_tokens} tokens in a step of at most {self.max_tokens}")
        if self._body is not None:
            self._body.run(num_tokens)
            return
        with torch.inference_mode():
            self._issue_body(num_tokens)

    def logits(self, num_rows: int) -> Tensor:
        """Logits float32[num_rows, V] of the rows in ``inputs.logits_index``; overwritten by the next call."""
        if not 0 <= num_rows <= self.max_logits:
            raise ValueError(f"logits of {num_rows} rows, of at most {self.max_logits}")
        if self._head is not None:
            self._head.run(num_rows)
        else:
            with torch.inference_mode():
                self._issue_head(num_rows)
        return self._logits[:num_rows].float()

    def _issue_body(self, rows: int) -> None:
        kernels, residual, x, normed = self._kernels, self._residual[:rows], self._x[:rows], self._normed[:rows]
        kernels.embed(self.inputs.ids[:rows], self._weights.embedding, residual)
        for i, layer in enumerate(self._weights.layers):
            if i == 0:
                kernels.rms_norm(residual, layer.input_norm, self.spec.norm_eps, normed)
            else:
                kernels.add_rms_norm(x, residual, layer.input_norm, self.spec.norm_eps, normed)
            self._issue_attention(i, layer, rows)
            kernels.add_rms_norm(x, residual, layer.mlp_norm, self.spec.norm_eps, normed)
            gate_up, activated = self._gate_up[:rows], self._activated[:rows]
            kernels.linear(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            kernels.act_and_mul(gate_up, self.spec.activation, activated)
            kernels.linear(activated, layer.down, layer.down_bias, x)

    def _issue_attention(self, index: int, layer: LayerWeights, rows: int) -> None:
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
        kernels.attention(qkv, k_pages, v_pages, inputs.batch, shape, attended, extras)
        kernels.linear(attended, layer.output, layer.output_bias, self._x[:rows])

    def _issue_head(self, rows: int) -> None:
        index, last = self.inputs.logits_index[:rows], self._last[:rows]
        self._kernels.gather_add_rms_norm(self._x, self._residual, index, self._weights.norm, self.spec.norm_eps, last)
        self._kernels.linear(last, self._weights.head, None, self._logits[:rows])
