"""From prepared prompts to requests in the log: limits, numbers, seeds, the append (rules L4, L6, L10, L14)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from redis.exceptions import RedisError

from octavo_gateway.aborts import Aborts
from octavo_gateway.errors import bad_request, context_overflow, unavailable
from octavo_gateway.keys import NOBODY, Caller
from octavo_gateway.limits import LimitsWatch
from octavo_gateway.log_reader import LogReader
from octavo_gateway.pressure import Pressure, work_of
from octavo_gateway.rates import Charge, Rates
from octavo_gateway.sampling import Draft
from octavo_gateway.slot import Presentation, note_of
from octavo_gateway.watcher import Watcher
from octavo_shared.ids import RequestId
from octavo_shared.records import AbortRecord, ModelLimits, RequestRecord, SamplingParams
from octavo_shared.streams import Streams

ADMIT_TIMEOUT_S = 5.0

PLAIN = Presentation("text_completion", "", 0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for, apart from the prompts."""

    draft: Draft
    caller: Caller = NOBODY
    priority: int = 0
    cache_salt: str = ""
    include_stop_str_in_output: bool = False
    traceparent: str = ""
    tracestate: str = ""
    presentation: Presentation = PLAIN
    # Characters of all prompts; 0 = they came as token ids.
    prompt_chars: int = 0
    # The prompts as text, where they are to be sent back.
    echo_texts: Sequence[str] = ()
    idempotency_key: str = ""
    # For how long an answer can be had again after its end, and goes on while nobody follows it.
    resume_ttl_s: float = 0.0
    disconnect_grace_s: float = 0.0
    # Unix microseconds; 0 = none.
    deadline_us: int = 0


class AlreadyAdmittedError(RuntimeError):
    """The idempotency key stands for another stream."""

    def __init__(self, stream: RequestId) -> None:
        super().__init__(str(stream))
        self.stream = stream


@dataclass(frozen=True, slots=True)
class Submission:
    """Admitted requests, one per prompt, the watcher of their log, their ticket among what is queued, and what they cost."""

    records: tuple[RequestRecord, ...]
    watcher: Watcher
    ticket: int
    charge: Charge


class Admission:
    """Decides what is let in and appends it."""

    def __init__(
        self,
        streams: Streams,
        limits: LimitsWatch,
        reader: LogReader,
        aborts: Aborts,
        pressure: Pressure,
        rates: Rates,
        seed: int | None,
    ) -> None:
        self._streams = streams
        self._limits = limits
        self._reader = reader
        self._aborts = aborts
        self._pressure = pressure
        self._rates = rates
        self._seed = seed
        self._minted = 0

    def check(self, prompts: Sequence[Sequence[int]], draft: Draft) -> list[SamplingParams]:
        """The sampling of each prompt, now that its length is known.

        Raises:
            ApiError: 400 for a request that can never be served, 503 when none can be now.
        """
        limits = self._limits.require()
        _check_ids(draft, limits.vocab_size)
        _check_beams(draft, limits.max_num_seqs)
        return [self._fit(prompt, draft, limits) for prompt in prompts]

    def _fit(self, prompt: Sequence[int], draft: Draft, limits: ModelLimits) -> SamplingParams:
        _check_prompt(prompt, limits.vocab_size)
        length = len(prompt)
        room = min(limits.max_model_len, limits.pool_tokens) - length
        wanted = draft.max_tokens
        if length + (wanted or 1) > limits.max_model_len:
            raise context_overflow(limits.max_model_len, wanted or 1, length)
        if (wanted or 1) > room:
            message = (
                f"The request needs a KV cache of {length + (wanted or 1)} tokens, but the server has room for "
                f"{limits.pool_tokens} in all. Please reduce the length of the input prompt or the number of requested "
                f"output tokens. (parameter=input_tokens, value={length})"
            )
            raise bad_request(message, "input_tokens", "context_length_exceeded")
        if wanted is None:
            wanted = room if draft.default_max_tokens is None else min(room, draft.default_max_tokens)
        if draft.params.min_tokens > wanted:
            message = f"min_tokens must be less than or equal to max_tokens={wanted}, got {draft.params.min_tokens}."
            raise bad_request(message, "min_tokens")
        return replace(
            draft.params,
            max_tokens=wanted,
            logprobs=limits.vocab_size if draft.params.logprobs == -1 else draft.params.logprobs,
            prompt_logprobs=limits.vocab_size if draft.params.prompt_logprobs == -1 else draft.params.prompt_logprobs,
        )

    async def submit(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], order: Order
    ) -> Submission:
        """Append one request per prompt, all or none of them.

        Raises:
            AlreadyAdmittedError: the idempotency key stands for an answer already.
            ApiError: 429 when they would wait for too long or the key has spent its rates, 503 when Redis does not take them.
        """
        draft = order.draft
        with ExitStack() as undo:
            work = work_of(prompts, samplings, draft.n, self._limits.require()) if order.caller.is_rated else 0
            charge = await self._rates.charge(order.caller, work)
            undo.callback(self._rates.settle, charge, 0, withdrawn=True)
            ticket = await self._pressure.take_on(prompts, samplings, draft.n, order.prompt_chars, order.deadline_us)
            undo.callback(self._pressure.give_back, ticket)
            watcher = self._reader.watch(len(prompts), draft.n)
            undo.callback(self._reader.unfollow, watcher)
            records = self._records(watcher.ids, prompts, samplings, order)
            holder = await self._append(records)
            if holder != records[0].id:
                # The key has just been taken by somebody who was faster.
                raise AlreadyAdmittedError(holder)
            undo.pop_all()
        self._reader.admitted(watcher, records)
        return Submission(records, watcher, ticket, charge)

    def _records(
        self,
        ids: Sequence[RequestId],
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        order: Order,
    ) -> tuple[RequestRecord, ...]:
        draft = order.draft
        arrival_us = time.time_ns() // 1000
        return tuple(
            RequestRecord(
                id=request_id,
                arrival_us=arrival_us,
                prompt=np.asarray(prompt, np.int32),
                sampling=replace(sampling, seed=self._mint_seed() if draft.seed is None else draft.seed),
                n=draft.n,
                priority=order.priority,
                tenant=order.caller.tenant,
                tenant_weight=order.caller.weight,
                cache_salt=order.cache_salt,
                deadline_us=order.deadline_us,
                traceparent=order.traceparent,
                tracestate=order.tracestate,
                stop=draft.stop,
                include_stop_str_in_output=order.include_stop_str_in_output,
                presentation=note_of(order.presentation, order.echo_texts[place] if order.echo_texts else ""),
                idempotency_key=order.idempotency_key,
                resume_ttl_ms=int(order.resume_ttl_s * 1000),
                disconnect_grace_ms=int(order.disconnect_grace_s * 1000),
                place=place,
                places=len(prompts),
            )
            for place, (request_id, prompt, sampling) in enumerate(zip(ids, prompts, samplings, strict=True))
        )

    async def _append(self, records: Sequence[RequestRecord]) -> RequestId:
        """As ``Streams.admit``. What may have been appended, though that is not known, is aborted."""
        try:
            async with asyncio.timeout(ADMIT_TIMEOUT_S):
                return await self._streams.admit(*records)
        except (RedisError, OSError, TimeoutError) as error:
            self._withdraw(records, "not_admitted")
            logger.warning("a request could not be appended: %r", error)
            raise unavailable("The request could not be queued: Redis cannot be reached.") from error
        except BaseException:
            self._withdraw(records, "disconnect")
            raise

    def _withdraw(self, records: Sequence[RequestRecord], reason: str) -> None:
        self._aborts.leave([AbortRecord(record.id, reason=reason) for record in records])

    def _mint_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        self._minted += 1
        text = f"{self._seed}/{self._minted}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    for bad in (min(prompt), max(prompt)):
        if not 0 <= bad < vocab_size:
            raise bad_request(f"Token id {bad} is out of vocabulary", "prompt")


def _check_beams(draft: Draft, max_num_seqs: int) -> None:
    width = draft.params.beam_width
    if 0 < max_num_seqs < width:
        message = f"A beam search of width {width} needs more sequences at once than the server runs ({max_num_seqs})."
        raise bad_request(message, "best_of")


def _check_ids(draft: Draft, vocab_size: int) -> None:
    for param, ids in (
        ("logit_bias", [token for token, _ in draft.params.logit_bias]),
        ("stop_token_ids", draft.params.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise bad_request(f"Token id {token} in {param} is out of vocabulary", param)
