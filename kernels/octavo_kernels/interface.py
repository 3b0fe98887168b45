"""The kernel interface that every backend implements. A folder per backend: ``reference`` (plain torch), ``cpu`` (C).

Shapes use these letters: T tokens of a step (all sequences flattened), S sequences, R rows of logits, H hidden size,
I intermediate size, V vocabulary, Hq query heads, Hk key/value heads, D head size, B page (block) size in tokens.

Page layout (one layer): K ``[blocks, Hk, D, B]`` (transposed, so that scores are a plain matrix product over
contiguous keys) and V ``[blocks, Hk, B, D]``. Slot n of the cache is offset ``n % B`` of page ``n // B``. A backend may
have another layout: ``Kernels.page_shapes`` says how its pages are allocated, and nobody else looks inside them.

Row independence is part of the contract: what a kernel computes for one token or row does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [n, K] of a weight matrix in 8 bits: ``values`` * ``scale`` of the row."""

    values: Tensor  # float8_e4m3fn[n, K]
    scale: Tensor  # float32[n]


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Rows [n, K] of a weight matrix in 4 bits: (``codes`` - ``zero``) * ``scale``, K / G inputs sharing the latter two."""

    codes: Tensor  # uint8[n, K], below 16
    scale: Tensor  # [n, G]
    zero: Tensor  # uint8[n, G], at most 16


WeightRows = Tensor | Fp8Rows | Int4Rows


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix in a backend's own layout; only the backend that made it may read its tensors."""

    data: Tensor
    out_features: int
    in_features: int
    scale: Tensor | None = None
    zero: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(part.nbytes for part in (self.data, self.scale, self.zero) if part is not None)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is fixed about a layer's attention. ``window`` 0 and ``soft_cap`` 0.0 mean none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionExtras:
    """What a layer's attention may have besides its shape."""

    sinks: Tensor | None = None  # [Hq] score of a key that every query sees and that has no value
    slopes: Tensor | None = None  # [Hq] slope * (j - i) is added to scores (ALiBi; Press et al., arXiv 2108.12409)
    k_scale: Tensor | None = None  # float32[Hk] what keys in float8_e4m3fn pages are multiples of
    v_scale: Tensor | None = None  # float32[Hk] the same of values


@dataclass(frozen=True, slots=True)
class PageShapes:
    """Shape of one page of one layer, for keys and for values."""

    k: tuple[int, ...]
    v: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What the host knows of a step, or of all steps that a captured graph may be replayed for: at most so many ..."""

    num_seqs: int
    max_queries: int  # query tokens of a sequence
    max_keys: int  # tokens of a sequence


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which sequences a step computes. The tensors stay the same objects for life; steps change what they hold.

    Only the first ``num_seqs[0]`` entries count. Queries of sequence s are rows ``query_start[s]:query_start[s + 1]``;
    they are its last tokens: ``seq_lens[s]`` counts all its keys, those of this step included.
    """

    num_seqs: Tensor  # int32[1]
    query_start: Tensor  # int32[S + 1]
    seq_lens: Tensor  # int32[S]
    block_tables: Tensor  # int32[S, pages], entries past a sequence's last page are never read
    bounds: StepBounds | None = None  # a hint for backends that cannot look into the tensors without waiting


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, and what the device knows of every sequence. Only the first ``num_rows[0]`` rows count.

    Row r computes tokens ``query_start[r]:query_start[r + 1]`` of the step: those of sequence ``slots[r]`` from position
    ``starts[r]`` on. ``tokens`` and ``tables`` are contiguous.
    """

    num_rows: Tensor  # int32[1]
    slots: Tensor  # int32[S]
    starts: Tensor  # int32[S]
    query_start: Tensor  # int32[S + 1]
    tokens: Tensor  # int32[slots, length]
    tables: Tensor  # int32[slots, pages]


class SampleStatus(IntEnum):
    """What became of a row of logits."""

    FINE = 0
    NOT_FINITE = 1  # NaN or +inf among the logits
    NOTHING_LEFT = 2  # every token was banned


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling parameters, one entry per row of logits.

    Ids outside the vocabulary are ignored wherever they occur. ``tokens[token_row[r], :token_count[r]]`` is the
    sequence so far; from ``output_start[r]`` on they are outputs (presence and frequency penalties look only at
    those, the repetition penalty at all).
    """

    temperature: Tensor  # float32[R], 0: greedy
    top_k: Tensor  # int32[R], 0: all
    top_p: Tensor  # float32[R], 1: all
    min_p: Tensor  # float32[R], 0: all
    presence: Tensor  # float32[R]
    frequency: Tensor  # float32[R]
    repetition: Tensor  # float32[R], 1: none
    seed: Tensor  # int64[R]
    position: Tensor  # int32[R], position of the sampled token in its sequence
    tokens: Tensor  # int32[rows, length]
    token_row: Tensor  # int32[R]
    token_count: Tensor  # int32[R]
    output_start: Tensor  # int32[R]
    bias_start: Tensor  # int32[R + 1]
    bias_ids: Tensor  # int32[...]
    bias_values: Tensor  # float32[...]
    banned_start: Tensor  # int32[R + 1]
    banned_ids: Tensor  # int32[...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Raw log-probabilities per row; of ``top_*`` only the first ``top_n[r]`` entries of a row are set."""

    logprob: Tensor  # float32[R], of the target
    rank: Tensor  # int32[R], 1 for the likeliest
    top_ids: Tensor  # int32[R, N]
    top_logprobs: Tensor  # float32[R, N]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens per row, the likeliest first; only the first ``found[r]`` entries of a row are set."""

    ids: Tensor  # int32[R, N]
    logprobs: Tensor  # float32[R, N]
    found: Tensor  # int32[R]
    status: Tensor  # uint8[R], SampleStatus


class Program(Protocol):
    """A recorded sequence of kernels over fixed buffers."""

    def run(self, rows: int) -> None:
        """Run it all for the first ``rows`` rows of every buffer."""


class Kernels(Protocol):
    """The operations of a transformer over paged memory. All outputs go to tensors the caller owns."""

    @property
    def name(self) -> str:
        """The backend's name."""

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The type activations must have beside weights of ``weight_dtype``."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for something large and long-lived (pages, weights)."""

    def page_shapes(self, shape: AttentionShape, dtype: torch.dtype) -> PageShapes:
        """How pages of keys and values in ``dtype`` are laid out.

        Raises:
            ValueError: the backend has no pages of that type.
        """

    def start_step(self) -> None:
        """The tensors of the batch hold another step. Whoever calls this must do so for every step.

        A backend that derives something from them may then do it once per step instead of once per layer.
        """

    def record(self) -> AbstractContextManager[Callable[[], Program]] | None:
        """Within the context, kernels are recorded instead of run; call what it yields afterwards for the program.

        The first dimension of every buffer used must then be the program's number of rows. None: not supported.
        """

    def write_rows(self, table: Tensor, segments: Tensor, words: Tensor, longest: int) -> None:
        """Pieces of ``words`` int32[...] into ``table`` int32[rows, width].

        ``segments`` int32[n, 4]: row, first column, first of its words, how many (at most ``longest``). No two overlap.
        """

    def put_tokens(self, table: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """table int32[..., ...] [rows[i], columns[i]] = tokens[i], int32[n] each."""

    def prepare_inputs(
        self,
        rows: StepRows,
        block_size: int,
        ids: Tensor,  # int32[T]
        positions: Tensor,  # int32[T]
        slots: Tensor,  # int32[T]
        block_tables: Tensor,  # int32[S, pages]
    ) -> None:
        """Inputs of the first layer, read off the tables: id, position and slot of the cache of each token, pages of each row.

        Tokens beyond those of the rows are padding, no more of it than S exceeds the rows: id -1, position 0, slot -1.
        """

    def can_hold(self, rows: Fp8Rows | Int4Rows) -> bool:
        """Whether matrices of such rows can be held and multiplied by as they are; else ``quantized.widen`` them."""

    def new_weight(self, rows: WeightRows, out_features: int, dtype: torch.dtype) -> LinearWeight:
        """Memory for a matrix [out_features, K] of rows like ``rows``; ``dtype`` is how plain ones are stored.

        What it holds is undefined until ``set_rows`` has set every row.
        """

    def set_rows(self, weight: LinearWeight, first: int, rows: WeightRows) -> None:
        """Rows ``first`` and following of ``weight`` become ``rows`` [n, K], on whatever device these are."""

    def pack(self, rows: WeightRows, dtype: torch.dtype) -> LinearWeight:
        """Bring a whole matrix [N, K] into the backend's layout, stored as ``dtype`` if it is plain."""

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor) -> None:
        """out [T, N] = x [T, K] @ weight^T (+ bias [N]).

        By a weight in fp8, x is rounded to e4m3 as well, in multiples of each row's own scale.
        """

    def embed(self, ids: Tensor, weight: LinearWeight, out: Tensor) -> None:
        """out [T, K] = rows ``ids`` int32[T] of a packed plain weight [V, K]; zeros for ids outside it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out [T, H] = weight [H] * x [T, H] / rms(x); Zhang and Sennrich, arXiv 1910.07467. ``out`` may be ``x``."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual [T, H] += x [T, H]; out [T, H] = norm of it. ``out`` may be ``x``."""

    def gather_add_rms_norm(
        self, x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """out [R, H] = norm of (x + residual) at rows ``index`` int32[R]; x and residual [T, H] stay as they are."""

    def act_and_mul(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """out [T, I] = activation(gate) * up, gate_up [T, 2I] = [gate | up]."""

    def rope_kv(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hk) D], changed in place
        positions: Tensor,  # int32[T]
        table: Tensor | None,  # float32[P, rot] = [cos | sin], rot <= D; None: no rotary
        q_norm: Tensor | None,  # [D]
        k_norm: Tensor | None,  # [D]
        eps: float,
        slots: Tensor,  # int32[T], negative: the token is not written
        k_pages: Tensor,  # [blocks, ...], see page_shapes
        v_pages: Tensor,  # [blocks, ...]
        shape: AttentionShape,
        extras: AttentionExtras | None = None,
    ) -> None:
        """Per-head RMS norm and rotary embedding (rotate halves; Su et al., arXiv 2104.09864) of q and k, then k and v
        into their pages. In ``qkv`` q becomes what attention takes; what is left of k there is up to the backend."""

    def attention(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hk) D], its first Hq heads are the queries
        k_pages: Tensor,  # [blocks, ...], see page_shapes
        v_pages: Tensor,  # [blocks, ...]
        batch: AttentionBatch,
        shape: AttentionShape,
        out: Tensor,  # [T, Hq D]
        extras: AttentionExtras | None = None,
    ) -> None:
        """Causal attention of every query over its sequence's pages; rows of no sequence are left alone.

        A query at position i sees keys j <= i, with a window w also j > i - w. With a soft cap c the scaled scores
        become c tanh(score / c). Keys past a sequence's length are never used, pages past it never read.
        """

    def copy_pages(self, pages: Tensor, source: Tensor, destination: Tensor) -> None:
        """pages [layers, blocks, ...]: page destination[i] = page source[i] in every layer (int32[m] each).

        No page may be both source and destination, nor destination twice.
        """

    def move_pages(
        self,
        source_pages: Tensor,  # [layers, blocks, ...]
        source: Tensor,  # int32[m]
        destination_pages: Tensor,  # [layers, other blocks, ...], another memory of the same type
        destination: Tensor,  # int32[m], no page twice
    ) -> None:
        """destination_pages: page destination[i] = page source[i] of source_pages, in every layer.

        A page of a layer is contiguous and of one size in both; layers and pages may lie at any distance. One side may be
        pinned host memory where the other is a device's.
        """

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        """Draw one token per row of logits float32[R, V] (left unchanged): token int32[R] (-1: none), status uint8[R].

        In order: penalties, bias, banned ids, temperature, min-p, top-k, top-p, Gumbel-max with noise that is a pure
        function of (seed, position, token id). Ties go to the lower id. Greedy rows skip all from temperature on.
        """

    def candidates(self, logits: Tensor, rows: SampleRows, wanted: Tensor, width: int) -> Candidates:
        """Of logits float32[R, V] (left unchanged) the ``wanted`` int32[R] likeliest tokens, in tables ``width`` wide.

        Penalties, bias and banned ids come first, as in ``sample``; then a softmax over what is left, without temperature
        or filters. Ties go to the lower id. Tokens of probability zero are none: a row may have fewer than wanted.
        """

    def logprobs(self, logits: Tensor, target: Tensor, top_n: Tensor, width: int) -> Logprobs:
        """Of logits float32[R, V] under softmax: that of ``target`` int32[R], its rank, and the best ``top_n`` int32[R]
        in tables ``width`` wide. A target outside the vocabulary gives -inf and rank 0."""
