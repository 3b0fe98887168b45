"""Was anything lost, repeated or different? Is anything left over?"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field

import redis.asyncio
from chaos_client import Choice, Told
from chaos_http import Exchange

from octavo_shared.streams import GROUP, Keys

# Likeliest tokens closer than this (in log-probability) are a tie that rounding may decide either way.
TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class Verdict:
    """What is wrong, by kind; empty lists are good news."""

    lost: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """The promise was kept."""
        return not (self.lost or self.ends or self.different or self.leaks)

    def compare(self, reference: list[Told], told: list[Told]) -> None:
        """Hold what clients were told against what they are told without faults."""
        for expected, got in zip(reference, told, strict=True):
            assert expected.job == got.job
            self._compare(expected, got)

    def _compare(self, expected: Told, got: Told) -> None:
        where = f"request {got.job.index} ({got.job.kind}{', resumable' if got.job.resumable else ''}, id {got.id})"
        if got.failure:
            self.lost.append(f"{where}: {got.failure}")
            return
        for watcher in got.watchers:
            self._compare_watcher(f"{where}, read beside its client", expected, watcher)
        if got.left or expected.left:
            return
        for index in range(got.job.choices):
            ends = got.choice(index).ends
            if len(ends) != 1:
                self.ends.append(f"{where}: choice {index} has {len(ends)} ends: {ends}")
        if got.job.stream and got.done != 1:
            self.ends.append(f"{where}: {got.done} times [DONE]")
        for index in range(max(got.job.choices, len(got.choices))):
            self._compare_choice(f"{where}, choice {index}", expected.choice(index), got.choice(index))
        if got.usage != expected.usage and not self._mentions(where):
            self.different.append(f"{where}: usage {got.usage} instead of {expected.usage}")
        for choices in got.abandoned:
            for index, choice in choices.items():
                if not expected.choice(index).text.startswith(choice.text) and not self._mentions(where):
                    self.different.append(
                        f"{where}, choice {index}: was told {choice.text!r} before its connection broke"
                    )

    def _compare_watcher(self, where: str, expected: Told, watcher: Told) -> None:
        # Only who read on to the end can say anything; the answer is not as long if its client has left.
        if watcher.done == 1 and not expected.left and not self._mentions(where.partition(", read")[0]):
            for index in range(watcher.job.choices):
                self._compare_choice(f"{where}, choice {index}", expected.choice(index), watcher.choice(index))

    def _mentions(self, where: str) -> bool:
        return any(line.startswith(where) for line in self.ties + self.different)

    def _compare_choice(self, where: str, expected: Choice, got: Choice) -> None:
        if (expected.text, expected.tokens, expected.ends) == (got.text, got.tokens, got.ends):
            far = [
                (a, b) for a, b in zip(expected.logprobs, got.logprobs, strict=True) if abs(a - b) > LOGPROB_TOLERANCE
            ]
            if far:
                self.different.append(f"{where}: log-probabilities {far[:3]}")
            return
        at = next(
            (i for i, pair in enumerate(zip(expected.tokens, got.tokens, strict=False)) if pair[0] != pair[1]),
            min(len(expected.tokens), len(got.tokens)),
        )
        note = f"at token {at} of {len(expected.tokens)}/{len(got.tokens)}"
        if at < len(expected.margins) and expected.margins[at] < TIE:
            self.ties.append(f"{where}: {note}, margin {expected.margins[at]:.1e}")
            return
        text = f"{expected.text!r} {expected.ends} became {got.text!r} {got.ends}"
        self.different.append(f"{where}: {note}: {text}")


async def find_leaks(client: redis.asyncio.Redis, port: int, model: str, *, patience_s: float = 120.0) -> list[str]:
    """What is still held although nobody waits for anything: blocks, slots, entries, keys."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    while True:
        leaks = [*await _held_blocks(port), *await _left_in_redis(client, Keys(model))]
        if not leaks or loop.time() > deadline_s:
            return leaks
        await asyncio.sleep(0.5)


async def _held_blocks(port: int) -> list[str]:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
    try:
        async with Exchange(port, "GET", "/metrics") as exchange:
            text = (await exchange.body()).decode()
    except ConnectionError as error:
        return [f"the metrics cannot be read: {error}"]
    held: Counter[str] = Counter()
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{.*\})? (\S+)", line)
        if match and match[1] in names:
            held[match[1]] += int(float(match[2]))
    return [f"{name} is {count}" for name, count in held.items() if count]


async def _left_in_redis(client: redis.asyncio.Redis, keys: Keys) -> list[str]:
    left = []
    if count := await client.xlen(keys.requests):
        left.append(f"{count} entries in the model stream")
    if count := (await client.xpending(keys.requests, GROUP))["pending"]:
        left.append(f"{count} pending entries")
    if count := await client.xlen(keys.aborts):
        left.append(f"{count} aborts")
    prefix = keys.log("").removesuffix("log:")
    living = {key.decode().rpartition(":")[2] async for key in client.scan_iter(match=_glob(prefix) + "gateway:*")}
    async for raw in client.scan_iter(match=_glob(prefix) + "*"):
        key = raw.decode().removeprefix(prefix)
        kind, _, name = key.partition(":")
        if kind == "request" or (kind == "control" and name):
            left.append(f"the key {key}")
        elif kind == "log" and name not in living:
            left.append(f"the log {name}, whose gateway is gone")
        elif kind == "log" and (length := await client.xlen(raw)) > 1:
            left.append(f"{length} entries in the log {name}")
    return left


def _glob(prefix: str) -> str:
    return prefix.replace("[", "\\[").replace("{", "\\{")
