"""Entries of the model stream as requests: what is believed, and what becomes of those that cannot be.

Gateways check what clients ask for. But a request goes into arithmetic, and into the numbers of blocks and slots: one that is
out of every range, by a fault or by somebody else who writes to Redis, must end as an error of its own and as nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from google.protobuf.message import DecodeError

from octavo_shared.entries import MalformedEntryError, decode_request
from octavo_shared.ids import RequestId
from octavo_shared.proto import request_pb2
from octavo_shared.records import Problem, RequestRecord, SamplingParams

# Requests of one answer. A gateway has lower bounds (--max-num-prompts).
MAX_PLACES = 1 << 16
_MOST_FLOAT = 1e30


def read_request(payload: bytes) -> RequestRecord:
    """The request that an entry holds.

    Raises:
        MalformedEntryError: it holds none, or one with numbers that mean nothing.
    """
    record = decode_request(payload)
    if reason := next(_faults(record), ""):
        raise MalformedEntryError(reason)
    return record


def remains_of(payload: bytes) -> RequestRecord | None:
    """What is left of a request that cannot be read: enough to end it and to clean up behind it. None: not even its name."""
    try:
        message = request_pb2.RequestRecord.FromString(payload)
        request_id = RequestId.parse(message.id)
    except (DecodeError, ValueError):
        return None
    placed = message.place < message.places <= MAX_PLACES and message.place <= request_id.serial
    return RequestRecord(
        request_id,
        arrival_us=0,
        prompt=np.empty(0, np.int32),
        sampling=SamplingParams(),
        tenant=message.tenant,
        idempotency_key=message.idempotency_key,
        place=message.place if placed else 0,
        places=message.places if placed else 1,
    )


def why_unservable(record: RequestRecord, vocab_size: int) -> Problem | None:
    """Why an executor with this vocabulary cannot serve a request; None when it can."""
    sampling = record.sampling
    named = {
        "prompt": int(record.prompt.max()),
        "stop_token_ids": max(sampling.stop_token_ids, default=0),
        "logit_bias": max((token for token, _ in sampling.logit_bias), default=0),
    }
    for param, token in named.items():
        if token >= vocab_size:
            return Problem(f"Token id {token} in {param} is out of vocabulary", 400, "BadRequestError", "", param)
    for param, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if (count or 0) > vocab_size:
            return Problem(f"{param} must be at most {vocab_size}, got {count}.", 400, "BadRequestError", "", param)
    return None


def _faults(record: RequestRecord) -> Iterator[str]:
    sampling = record.sampling
    if not (record.place < record.places <= MAX_PLACES and record.place <= record.id.serial):
        yield "its place among the requests of its answer"
    if int(record.prompt.min()) < 0:
        yield "a token id below 0"
    if not 0 <= record.tenant_weight < math.inf:
        yield "its tenant's weight"
    floats = {
        "temperature": (sampling.temperature, 0.0, _MOST_FLOAT),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "presence_penalty": (sampling.presence_penalty, -_MOST_FLOAT, _MOST_FLOAT),
        "frequency_penalty": (sampling.frequency_penalty, -_MOST_FLOAT, _MOST_FLOAT),
        "repetition_penalty": (sampling.repetition_penalty, 0.0, _MOST_FLOAT),
        "length_penalty": (sampling.length_penalty, -_MOST_FLOAT, _MOST_FLOAT),
    }
    # Comparisons with what is no number are false.
    yield from (name for name, (value, least, most) in floats.items() if not least <= value <= most)
    counts = {
        "top_k": (sampling.top_k, 0),
        "max_tokens": (sampling.max_tokens, 1),
        "min_tokens": (sampling.min_tokens, 0),
        "logprobs": (sampling.logprobs or 0, 0),
        "prompt_logprobs": (sampling.prompt_logprobs or 0, 0),
    }
    yield from (name for name, (value, least) in counts.items() if value < least)
    if any(token < 0 for token in sampling.stop_token_ids):
        yield "stop_token_ids"
    if any(token < 0 or not abs(bias) <= _MOST_FLOAT for token, bias in sampling.logit_bias):
        yield "logit_bias"
