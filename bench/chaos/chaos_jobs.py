"""What is asked: a mixture of everything whose output is determined by the request, made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_SAYING = "the cat sat on a mat and that dog ate old hat rain fell by river no one could tell when it would end"
_WORDS = _SAYING.split()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a client.

    ``resumable``: it reconnects where its connection breaks; others begin again. ``leaves_after``: it hangs up after so many
    events and never comes back (0: it stays). ``watched``: somebody else reads the same stream beside it.
    """

    index: int
    kind: str
    path: str
    body: dict[str, Any]
    resumable: bool
    leaves_after: int = 0
    watched: bool = False

    @property
    def stream(self) -> bool:
        """Answered by server-sent events."""
        return bool(self.body.get("stream"))

    @property
    def choices(self) -> int:
        """How many outputs are owed."""
        return int(self.body.get("n", 1))


def _greedy(rng: random.Random) -> dict[str, Any]:
    return {"temperature": 0}


def _seeded(rng: random.Random) -> dict[str, Any]:
    return {"temperature": rng.choice([0.7, 1.0, 1.3]), "top_p": rng.choice([1, 0.9]), "top_k": rng.choice([0, 40])}


def _choices(rng: random.Random) -> dict[str, Any]:
    return {"temperature": 1.0, "n": rng.randint(2, 4)}


def _beams(rng: random.Random) -> dict[str, Any]:
    n = rng.randint(1, 3)
    return {
        "use_beam_search": True,
        "n": n,
        "best_of": n + rng.randint(0, 1) + (n == 1),
        "max_tokens": 4 + rng.randrange(12),
    }


def _logprobs(rng: random.Random) -> dict[str, Any]:
    return {"temperature": rng.choice([0, 1.0]), "logprobs": 2, "return_tokens_as_token_ids": True}


def _penalties(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0, 0.8]),
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": rng.choice([0, 8]),
        "logit_bias": {str(rng.randrange(2, 300)): 2.0},
    }


def _stops(rng: random.Random) -> dict[str, Any]:
    stop = rng.sample(["e", "th", "a", " o", "n t", "at ", "!", "\u00e9"], 2)
    return {"temperature": 1.0, "stop": stop, "include_stop_str_in_output": rng.random() < 0.3, "n": rng.randint(1, 2)}


_KINDS = {
    "greedy": _greedy,
    "seeded": _seeded,
    "choices": _choices,
    "beams": _beams,
    "logprobs": _logprobs,
    "penalties": _penalties,
    "stops": _stops,
}


def make_jobs(count: int, seed: int, most_tokens: int) -> list[Job]:
    """``count`` requests of up to ``most_tokens`` (at least 16) output tokens per choice; equal seeds give equal ones."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(_WORDS, k=rng.randint(8, 40))) for _ in range(6)]
    return [_make_job(index, rng, beginnings, most_tokens) for index in range(count)]


def _make_job(index: int, rng: random.Random, beginnings: list[str], most_tokens: int) -> Job:
    kind = list(_KINDS)[index % len(_KINDS)]
    prompt = rng.choice(beginnings) + " " + " ".join(rng.choices(_WORDS, k=rng.randint(0, 10)))
    body: dict[str, Any] = {"model": "chaos", "max_tokens": rng.randint(8, most_tokens), "seed": rng.randrange(1 << 62)}
    body |= _KINDS[kind](rng)
    path = COMPLETIONS
    if kind != "logprobs" and rng.random() < 0.3:
        path = CHAT
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if kind in ("greedy", "seeded", "choices") and path == COMPLETIONS:
        # Then every token is seen as such, not only the text that they make.
        body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    style = rng.random()
    if style < 0.85:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    resumable = style < 0.5
    leaves_after = rng.randint(1, 12) if body.get("stream") and rng.random() < 0.05 else 0
    return Job(index, kind, path, body, resumable, leaves_after, watched=resumable and rng.random() < 0.15)
