"""The step protocol between a scheduler and an executor, as frozen dataclasses over numpy arrays.

A plan is a *difference* to the plan before it: the executor keeps, by slot, each sequence's token ids, block table,
lengths and sampling parameters, and a plan says what changes and which rows compute. The same objects are used in
process (simulator, benchmarks) and, through ``octavo_shared.wire``, over gRPC.

Phases of a plan, strictly in this order (rules R1–R3 of the design):

1. ``release``: slots given up. Their sequences are gone (finished, aborted or preempted).
2. ``admit``: sequences that take a slot. A resumed sequence is the same as a new one: its prompt is prompt + outputs so
   far and ``output_start`` marks where the outputs begin.
3. ``grow`` and ``swap``: block tables get longer; single entries are replaced (copy-on-write).
4. ``copy_out`` (device to host), ``copies`` (device to device), ``restores`` (host to device).
5. forward: row i computes ``row_tokens[i]`` tokens of slot ``row_slots[i]`` from position ``row_starts[i]``, which always
   equals the number of tokens of that slot whose keys and values are in the pages.
6. sample: a row with ``row_samples[i] > 0`` has reached the end of its known tokens; its last logits are sampled and each
   sampled token is appended to the slot named in ``sample_slots``.

**Forks.** A row may be sampled into other slots as well: children, admitted no later than this plan with the row's tokens
and the very pages it computes into. From then on each is a sequence of its own. Block tables therefore may share pages;
before a slot writes into a shared one, a plan gives it another (``swap``) with the same content (``copies``).

**Beams.** A slot whose ``sampling.beam_width`` is W > 0 is a beam: its sample yields the 2W likeliest next tokens with their
log-probabilities, appends and ends nothing, and writes nothing into the log. Which of them go on is the scheduler's affair:
they come back as new sequences.

**Page moves.** Within a phase a page is a destination once; among ``copies`` it is never a source too. The scheduler lets
nothing compute on a restored page, and gives no host page to another use, before the plan that moves it is acknowledged:
executors may carry moves between the tiers out beside the forward pass. A device page that is copied out may be written by
later phases of the very same plan, since that is why it is saved; what writes to it has to wait for the copy.

The executor knows a slot's newest token before the scheduler does (run-ahead), so a plan may say "one more" for a
sequence that has ended meanwhile. Such a row is skipped and its sample count is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo_shared.ids import RequestId
from octavo_shared.records import Float32Array, Int32Array, Problem, SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 1

NO_INTS: Int32Array = np.empty(0, np.int32)
NO_GENERATIONS: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
NO_BYTES: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
NO_FLOATS: Float32Array = np.empty(0, np.float32)
NO_LONGS: npt.NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """How long a step took that computed so many prompt tokens and drew a token for each of so many sequences.

    The prompt tokens attended to ``context_tokens`` that were there before.
    """

    prompt_tokens: int
    sequences: int
    seconds: float
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """How an executor introduces itself. Lengths are in tokens; ``block_bytes`` is one page over all layers.

    ``eos_token_ids`` are the model's own ends of outputs; ``measured`` steps it has timed before it attached, if it has.
    """

    name: str
    incarnation: str
    model: str
    fingerprint: str
    num_device_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    num_host_blocks: int = 0
    run_ahead: int = 1
    kv_dtype: str = "float32"
    block_bytes: int = 0
    eos_token_ids: tuple[int, ...] = ()
    highest_term: int = 0
    protocol: int = PROTOCOL_VERSION
    measured: tuple[MeasuredStep, ...] = ()


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Page moves of one phase: parallel arrays int32[m], int32[m], uint32[m] (generation of the device page)."""

    source: Int32Array = field(default_factory=lambda: NO_INTS)
    destination: Int32Array = field(default_factory=lambda: NO_INTS)
    generations: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_GENERATIONS)

    def __len__(self) -> int:
        return len(self.source)


NO_MOVES = PageMoves()


@dataclass(frozen=True, slots=True)
class PageNames:
    """What pages of one tier hold: parallel arrays int32[m], int64[m], int64[m].

    ``numbers`` names the content of each page, 0 where nothing is to be found any more; ``parents`` the content it continues,
    or the root of its chain. ``tokens`` int32[named, block_size] are the token ids of those whose number is not 0.
    """

    pages: Int32Array = field(default_factory=lambda: NO_INTS)
    numbers: npt.NDArray[np.int64] = field(default_factory=lambda: NO_LONGS)
    parents: npt.NDArray[np.int64] = field(default_factory=lambda: NO_LONGS)
    tokens: Int32Array = field(default_factory=lambda: NO_INTS)

    def __len__(self) -> int:
        return len(self.pages)


NO_NAMES = PageNames()


@dataclass(frozen=True, slots=True)
class CacheOffer:
    """What an executor's pages hold, as schedulers before have told it; ``roots`` are (number, root of a chain)."""

    device: PageNames = NO_NAMES
    host: PageNames = NO_NAMES
    roots: tuple[tuple[int, bytes], ...] = ()


NO_OFFER = CacheOffer()


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence takes slot ``slot``.

    ``tokens`` int32[num_tokens] is the prompt and every output so far; the first ``output_start`` of them are the prompt.
    ``num_computed`` of them have their keys and values in the pages of ``block_table`` int32[blocks] already (always fewer
    than num_tokens; a fork's child has as many as the row's own sequence). ``seed`` is the choice's own. The sequence ends by length when it has ``max_total_tokens`` tokens,
    prompt included. ``attempt`` is the n of its attempt; the term is the plan's.
    """

    slot: int
    request_id: RequestId
    choice: int
    attempt: int
    tokens: Int32Array
    output_start: int
    num_computed: int
    block_table: Int32Array
    sampling: SamplingParams
    seed: int
    max_total_tokens: int
    lora: str = ""
    no_cache_read: bool = False
    deadline_us: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes; see the module's docstring for the phases. All arrays are int32 and one-dimensional."""

    term: int
    epoch: int
    step: int
    release: Int32Array = field(default_factory=lambda: NO_INTS)
    admit: tuple[NewSequence, ...] = ()
    # (slot, page) pairs appended to block tables in order.
    grow_slots: Int32Array = field(default_factory=lambda: NO_INTS)
    grow_blocks: Int32Array = field(default_factory=lambda: NO_INTS)
    # (slot, index, page): entries replaced.
    swap_slots: Int32Array = field(default_factory=lambda: NO_INTS)
    swap_indices: Int32Array = field(default_factory=lambda: NO_INTS)
    swap_blocks: Int32Array = field(default_factory=lambda: NO_INTS)
    copy_out: PageMoves = NO_MOVES
    copies: PageMoves = NO_MOVES
    restores: PageMoves = NO_MOVES
    # Rows: [rows] each.
    row_slots: Int32Array = field(default_factory=lambda: NO_INTS)
    row_starts: Int32Array = field(default_factory=lambda: NO_INTS)
    row_tokens: Int32Array = field(default_factory=lambda: NO_INTS)
    row_samples: Int32Array = field(default_factory=lambda: NO_INTS)
    # [sum(row_samples)]
    sample_slots: Int32Array = field(default_factory=lambda: NO_INTS)
    # [rows] or empty; [sum(row_drafts)] or empty.
    row_drafts: Int32Array = field(default_factory=lambda: NO_INTS)
    draft_tokens: Int32Array = field(default_factory=lambda: NO_INTS)
    # What pages hold, as of the moment before this plan moves or computes anything.
    names: CacheOffer = NO_OFFER


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a step's time went (seconds).

    ``wait_s``: the executor was idle and waited for the plan. ``queued_s``: the plan was there and waited for the step
    before it. Then preparing the batch (page moves included), forward, sampling. ``publish_s`` is the most recent append to
    the log, which runs beside the forward pass. ``restore_s`` is what this step's restores took, within ``prepare_s`` or
    beside the forward pass.
    """

    wait_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    publish_s: float = 0.0
    queued_s: float = 0.0
    restore_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, as the scheduler needs it.

    ``sample_counts`` int32[samples of the plan]: tokens accepted per sample, 0 where the slot had ended before.
    ``tokens`` int32[sum(sample_counts)]. ``ends`` uint8[samples]: EndReason after them. ``failed`` means the whole step
    did not happen and the epoch is over; ``message`` then says why.

    A beam's tokens are its candidates, the likeliest first (of equals the lower id): 2 x ``beam_width``, or as many as have
    a probability above zero. ``scores`` float32[candidates] are their log-probabilities, beam by beam, after penalties, bias
    and banned ids but before temperature; other samples have none. A beam's row that is not finite has no candidates and
    ends by ERROR.

    ``logged_step`` is the newest step of the epoch whose tokens were in the logs when this was sent, 0 for none.
    """

    term: int
    epoch: int
    step: int
    sample_counts: Int32Array
    tokens: Int32Array
    ends: npt.NDArray[np.uint8]
    failed: bool = False
    message: str = ""
    timings: StepTimings = field(default_factory=StepTimings)
    scores: Float32Array = field(default_factory=lambda: NO_FLOATS)
    logged_step: int = 0


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One sequence's output of one step, on its way into the log.

    ``position`` is the output position of the first token (0 = first output: tokens before ``output_start`` do not
    count). ``end`` follows the last token; ``stop_token`` is the token id that ended it, -1 when none did (an end by
    eos is END by STOP with ``stop_token`` set as well; gateways know which ids are the model's own). ``logprobs`` has one
    entry per token, or None when not asked for. ``prompt_logprobs`` has prompt_tokens - 1 entries (the first prompt token
    has none) and comes only with position 0. So does ``cached_tokens``: how many prompt tokens were found in the prefix
    cache when the sequence got the slot in which it drew its first output; a fork's are those of the row's own sequence.
    """

    request_id: RequestId
    choice: int
    attempt: int
    position: int
    tokens: tuple[int, ...]
    end: int = 0
    stop_token: int = -1
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    problem: Problem | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything ``Runner.execute`` yields: the scheduler's part and the log's part."""

    result: StepResult
    rows: tuple[OutputRow, ...]
