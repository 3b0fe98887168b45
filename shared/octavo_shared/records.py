"""What a request is, once it has left HTTP behind: frozen records that travel between the rooms."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from octavo_shared.ids import RequestId

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

SEED_MASK = (1 << 64) - 1


class EndReason(IntEnum):
    """Why a choice ended. The numbers are those of the wire (``log.proto``)."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    TIMEOUT = 5

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for it; None while the choice lives."""
        return None if self is EndReason.NONE else self.name.lower()


class EarlyStopping(IntEnum):
    """When beam search may end before the longest output it could make; Hugging Face transformers' three modes.

    ``HEURISTIC`` (theirs: False): once the best live beam, were it to end now, would not beat the worst hypothesis kept.
    ``FIRST`` (True): once as many hypotheses as there are beams have ended. ``NEVER`` ("never"): once no live beam could
    beat the worst hypothesis kept, however long it became. The numbers are those of the wire (``request.proto``).
    """

    HEURISTIC = 0
    FIRST = 1
    NEVER = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something was refused or failed, in the terms of the HTTP answer. Empty strings mean null."""

    message: str
    status: int = 500
    type: str = "InternalServerError"
    code: str = ""
    param: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How every choice of a request draws its tokens; vLLM's names and meanings.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repetition_penalty`` 1 are off. ``logprobs``
    None means none; k means the drawn token's and the k likeliest. Log-probabilities are raw: before penalties and
    temperature. Choice i draws with ``seed + i`` (mod 2^64).

    ``beam_width`` 0 draws; more searches with so many live beams (``temperature``, ``top_p``, ``top_k``, ``min_p`` and
    ``seed`` then mean nothing), ranks hypotheses by log-probability / output length ** ``length_penalty``, and returns
    the request's ``n`` best ones as its choices.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def seed_of(self, choice: int) -> int:
        """The seed of one choice (rule L10)."""
        return (self.seed + choice) & SEED_MASK


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One prompt and its ``n`` choices, as admitted.

    ``prompt`` is int32[prompt_tokens]. Times are Unix microseconds; ``deadline_us`` 0 means none. ``presentation`` is
    the gateway's own note (JSON) of how to render the answer. ``resume_ttl_ms``: for how long after its end the answer can
    be had again; ``disconnect_grace_ms``: how long it goes on while nobody follows it. ``readmitted``: appended again after
    Redis had lost it, so its log may hold part of the answer. It is request number ``place`` of the ``places`` of one answer,
    whose serials follow each other. ``tenant_weight`` is the tenant's share under the fair policy, 0 = not said.
    """

    id: RequestId
    arrival_us: int
    prompt: Int32Array
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    lora: str = ""
    deadline_us: int = 0
    traceparent: str = ""
    tracestate: str = ""
    idempotency_key: str = ""
    owner_generation: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    presentation: bytes = b""
    resume_ttl_ms: int = 0
    disconnect_grace_ms: int = 0
    place: int = 0
    places: int = 1
    readmitted: bool = False
    tenant_weight: float = 0.0

    @property
    def siblings(self) -> tuple[RequestId, ...]:
        """The requests of its answer, itself included, in their order."""
        first = self.id.serial - self.place
        return tuple(RequestId(self.id.log, serial) for serial in range(first, first + self.places))


# Of whoever says what anybody would who follows the request.
ANY_GENERATION = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """Someone no longer wants a choice (``choice`` -1: all of them) of a request.

    With ``new_owner`` it is no abort: a client of that gateway follows the request from now on, under ``owner_generation``.
    """

    request_id: RequestId
    choice: int = -1
    owner_generation: int = 0
    reason: str = "abort"
    new_owner: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probability of one token, its rank (1 = likeliest) and the likeliest alternatives as (id, value)."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a scheduler publishes so that gateways can refuse early and truthfully (rule L14). Counts are in tokens.

    ``queued_tokens`` is the work owed to requests that have not ended: prompt tokens not computed yet, and the outputs they
    are expected to make. ``expected_outputs[i]`` is how many output tokens a choice with ``max_tokens`` 2^i makes on average,
    as learned from those that have ended.
    """

    model: str
    max_model_len: int
    pool_tokens: int
    vocab_size: int
    ready: bool
    # Why it is not ready, for people.
    reason: str = ""
    executors: int = 0
    term: int = 0
    # Unix seconds at which this was written.
    written_s: float = field(default=0.0)
    # Sequences that can run at once on the largest executor; 0 = not known.
    max_num_seqs: int = 0
    queued_tokens: int = 0
    # Tokens computed or drawn per second, recently, by all executors together; 0 = not measured yet.
    tokens_per_s: float = 0.0
    # More work than this is not to be queued; 0 = no bound.
    max_queued_tokens: int = 0
    expected_outputs: tuple[float, ...] = ()
    # What a newcomer has to expect, in seconds as learned or measured (0 = not known): for each token of its prompt; for having
    # one at all; of a step that computes no prompt, once it is one of those that run, and when it is alone; until there is a
    # slot and memory for it.
    prompt_token_s: float = 0.0
    prompt_s: float = 0.0
    step_s: float = 0.0
    lone_step_s: float = 0.0
    slot_wait_s: float = 0.0
    # Prompt tokens that are still to be computed, by the log of their requests.
    prompts_ahead: dict[str, int] = field(default_factory=dict)
    # A request's turn is not to come later; 0 = no bound. And what is the rule once that was exceeded (see the settings).
    max_queue_wait_s: float = 0.0
    max_ttft_ratio: float = 0.0

    def expected_output(self, max_tokens: int) -> float:
        """Output tokens that a choice with ``max_tokens`` is expected to make; ``max_tokens`` while nothing is known."""
        known = self.expected_outputs
        if not known or max_tokens < 1:
            return float(max(max_tokens, 0))
        place = max_tokens.bit_length() - 1
        if place >= len(known) - 1:
            return min(known[-1], float(max_tokens))
        share = max_tokens / (1 << place) - 1.0
        return known[place] + share * (known[place + 1] - known[place])
