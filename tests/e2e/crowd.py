"""Requests of every kind that has state to lose, and what undisturbed services answer."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import httpx
from service_set import Answer, Services, ask, events, wait_until

PROMPT = "It was the best of times, it was"
Bodies = dict[str, dict[str, Any]]
_KINDS: Bodies = {
    "greedy": {"temperature": 0, "max_tokens": 160},
    "seeded": {"seed": 7, "temperature": 1.0, "max_tokens": 160},
    "choices": {"n": 3, "seed": 11, "temperature": 0.8, "top_p": 0.9, "max_tokens": 120, "logprobs": 2},
    "beams": {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 60, "logprobs": 0},
    "penalties": {
        "seed": 3,
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "max_tokens": 160,
    },
}


class Reference:
    """The requests, and their answers while nothing happens. One is cut by a stop string that its text is known to have."""

    def __init__(self, services: Services) -> None:
        common = {"prompt": PROMPT, "ignore_eos": True}
        self.bodies: Bodies = {name: {**common, **body} for name, body in _KINDS.items()}
        text = ask(services.url, self.bodies["greedy"]).text[0]
        self.bodies["stopped"] = {**self.bodies["greedy"], "stop": [text[len(text) // 2 :][:12]]}
        self.answers: dict[str, Answer] = {name: ask(services.url, body) for name, body in self.bodies.items()}
        assert self.answers["stopped"].ends == {0: "stop"}
        assert set(self.answers["choices"].ends) == {0, 1, 2}


class Crowd:
    """All kinds of requests, several times at once, while something is done to the services."""

    def __init__(self, services: Services, reference: Reference, rounds: int = 2) -> None:
        self._services, self._reference = services, reference
        self._pool = concurrent.futures.ThreadPoolExecutor(16)
        names = list(reference.bodies) * rounds
        self._begun = [threading.Event() for _ in names]
        # How many pieces have come; numbers drawn from a counter would need a lock.
        self._heard: list[None] = []
        self._answers = [
            (name, self._pool.submit(self._ask, reference.bodies[name], begun))
            for name, begun in zip(names, self._begun, strict=True)
        ]

    def _ask(self, body: dict[str, Any], begun: threading.Event) -> Answer:
        answer = Answer()
        try:
            for event in events(self._services.url, body):
                self._heard.append(None)
                begun.set()
                answer.take(event)
        finally:
            begun.set()
        return answer

    def wait_until_begun(self) -> None:
        """Every client has had something of its answer."""
        assert all(begun.wait(60) for begun in self._begun)

    def wait_until_under_way(self, pieces: int = 30) -> None:
        """Clients have had so many pieces of their answers, all in all, and not everything yet."""
        wait_until(lambda: len(self._heard) >= pieces, 60, "the crowd's being under way")
        assert not self.is_answered, "there is nothing left to disturb"

    @property
    def is_answered(self) -> bool:
        return all(answer.done() for _, answer in self._answers)

    def expect_undisturbed(self) -> None:
        """Every client got what it would have got, and nothing is left behind."""
        for name, answer in self._answers:
            assert answer.result(180) == self._reference.answers[name], name
        self._pool.shutdown()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
        wait_until(lambda: not any(metric(self._services, name) for name in names), 30, "being idle")


def metric(services: Services, name: str) -> float:
    """A metric's value, summed over its label sets."""
    text = httpx.get(f"{services.url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))
