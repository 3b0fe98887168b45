"""The requests of a run: random prompts, arrival times, and sending them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from octavo.bench.http import ConnectionPool, HttpError, Target
from octavo.errors import CommandError

# One token each, with the space before it, in nearly every English vocabulary.
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
    "time",
    "could",
    "no",
    "make",
    "than",
    "first",
    "been",
    "its",
    "who",
    "now",
    "people",
    "my",
    "made",
    "over",
]
_DEFAULT_VOCABULARY = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send: shapes of the prompts and the parameters all requests share."""

    num_prompts: int
    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0  # lengths vary uniformly by this share either way
    prefix_tokens: int = 0  # tokens all prompts begin with, on top of input_tokens
    ignore_eos: bool = False
    temperature: float | None = None
    as_text: bool = False
    tokenizer: str | None = None
    vocabulary: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request as the bytes that go out; nothing is left to do while the clock runs."""

    wire: bytes
    input_tokens: int


@dataclass(slots=True)
class Outcome:
    """What one request experienced. Times are perf_counter seconds."""

    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between successive events that carried text
    events: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def prepare(workload: Workload, target: Target, endpoint: str, model: str) -> list[PreparedRequest]:
    """Draw every prompt of the run. Equal seeds give equal prompts. Raises CommandError."""
    rng = np.random.default_rng(workload.seed)
    chat = endpoint.rstrip("/").endswith("chat/completions")
    source = _Prompts(workload, rng, as_text=workload.as_text or chat)
    prefix = source.draw(workload.prefix_tokens)
    requests = []
    for _ in range(workload.num_prompts):
        input_tokens = _vary(rng, workload.input_tokens, workload.range_ratio)
        body: dict[str, object] = {
            "model": model,
            "max_tokens": _vary(rng, workload.output_tokens, workload.range_ratio),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompt = source.join(prefix, source.draw(input_tokens))
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if workload.temperature is not None:
            body["temperature"] = workload.temperature
        wire = target.request("POST", endpoint, json.dumps(body, separators=(",", ":")).encode())
        requests.append(PreparedRequest(wire, input_tokens + workload.prefix_tokens))
    return requests


def _vary(rng: np.random.Generator, length: int, ratio: float) -> int:
    low, high = int(length * (1 - ratio)), int(length * (1 + ratio))
    return max(1, int(rng.integers(low, high + 1)))


class _Prompts:
    """Random prompts as token ids, which have an exact length, or as text, which chat endpoints need."""

    def __init__(self, workload: Workload, rng: np.random.Generator, *, as_text: bool) -> None:
        self._rng = rng
        self._as_text = as_text
        self._tokenizer = _load_tokenizer(workload.tokenizer) if workload.tokenizer else None
        if self._tokenizer is not None:
            special = {int(i) for i in self._tokenizer.get_added_tokens_decoder()}
            size = workload.vocabulary or int(self._tokenizer.get_vocab_size())
            self._ids = np.array([i for i in range(size) if i not in special])
        else:
            # The lowest ids are special tokens in many vocabularies.
            size = workload.vocabulary or _DEFAULT_VOCABULARY
            self._ids = np.arange(min(256, size // 2), size)

    def draw(self, tokens: int) -> list[int] | str:
        if not self._as_text:
            return [int(i) for i in self._rng.choice(self._ids, tokens)]
        if self._tokenizer is None:
            return "".join(f" {_WORDS[i]}" for i in self._rng.integers(0, len(_WORDS), tokens))
        # Decoding and encoding again need not give the same ids: draw more and cut to length.
        text = self._tokenizer.decode([int(i) for i in self._rng.choice(self._ids, tokens)])
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return str(self._tokenizer.decode(ids[:tokens]))

    def join(self, prefix: list[int] | str, rest: list[int] | str) -> list[int] | str:
        if isinstance(prefix, str) and isinstance(rest, str):
            return prefix + rest
        assert isinstance(prefix, list)
        assert isinstance(rest, list)
        return prefix + rest


def _load_tokenizer(where: str):  # type: ignore[no-untyped-def]  # tokenizers is optional here
    from tokenizers import Tokenizer

    path = Path(where).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise CommandError(f"--tokenizer: {where} holds no tokenizer.json")
    return Tokenizer.from_file(str(path))


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due; all 0 for an infinite rate.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness` (1: a Poisson process), then
    scaled so that the last arrival falls where the rate says.
    """
    if rate_per_s == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed + 1).gamma(burstiness, 1.0 / (rate_per_s * burstiness), count)
    times = np.cumsum(gaps)
    return [float(t) for t in times * (count / rate_per_s / times[-1])]


async def send(pool: ConnectionPool, request: PreparedRequest) -> Outcome:
    """Send one request and time its events; a failure is recorded, not raised."""
    outcome = Outcome(input_tokens=request.input_tokens)
    finished = False

    def on_event(payload: bytes, now: float) -> None:
        nonlocal finished
        if payload == b"[DONE]":
            finished = True
            return
        event = json.loads(payload)
        outcome.events += 1
        if "error" in event:
            outcome.error = str(event["error"])
            return
        usage = event.get("usage")
        if usage:
            outcome.input_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
        choices = event.get("choices")
        if not choices or not _has_text(choices[0]):
            return
        if outcome.first_token_s == 0.0:
            outcome.first_token_s = now
        else:
            outcome.gaps_s.append(now - outcome.last_token_s)
        outcome.last_token_s = now

    outcome.started_s = perf_counter()
    try:
        await pool.exchange(request.wire, on_event)
        if not outcome.error and not finished:
            outcome.error = "the stream ended without [DONE]"
    except HttpError as error:
        outcome.error = str(error)
    except (ValueError, KeyError, TypeError) as error:
        outcome.error = f"not a completion stream ({error!r})"
    outcome.ended_s = perf_counter()
    if not outcome.error and outcome.first_token_s == 0.0:
        # Held back to the end, or tokens that are no text by themselves: the end is all there is to see.
        outcome.first_token_s = outcome.last_token_s = outcome.ended_s
    if not outcome.output_tokens:
        outcome.output_tokens = len(outcome.gaps_s) + 1 if not outcome.error else 0
    return outcome


def _has_text(choice: dict[str, object]) -> bool:
    text = choice.get("text")
    if text is None:
        delta = choice.get("delta")
        text = delta.get("content") or delta.get("reasoning_content") if isinstance(delta, dict) else None
    return bool(text)


async def run_load(
    pool: ConnectionPool,
    requests: list[PreparedRequest],
    due_s: list[float],
    max_concurrency: int | None,
    on_done: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Send everything at its time, at most `max_concurrency` at once; the outcomes and the run's seconds."""
    gate = asyncio.Semaphore(max_concurrency or len(requests))

    async def one(request: PreparedRequest) -> Outcome:
        async with gate:
            outcome = await send(pool, request)
        on_done(outcome)
        return outcome

    started_s = perf_counter()
    tasks = []
    for request, due in zip(requests, due_s, strict=True):
        wait_s = started_s + due - perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(request)))
    outcomes = await asyncio.gather(*tasks)
    return list(outcomes), perf_counter() - started_s
