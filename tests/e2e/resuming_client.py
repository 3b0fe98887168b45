"""A client of a stream that survives its connections: it goes on where it was, at whichever gateway answers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

RESUMABLE = {"X-Octavo-Resumable": "1"}


@dataclass
class Reading:
    """One client's stream, over as many connections as it takes."""

    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=lambda: dict(RESUMABLE))
    last: str = ""
    name: str = ""
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: Any = None
    done: bool = False
    statuses: list[int] = field(default_factory=list)

    def read(self, url: str, *, events: int = 1 << 30) -> None:
        """Read on at ``url`` until the connection ends, or for so many events."""
        headers = dict(self.headers) | ({"Last-Event-ID": self.last} if self.last else {})
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**self.body, "stream": True}, headers=headers, timeout=60
            ) as answer:
                self.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    return
                fields: dict[str, str] = {}
                for line in answer.iter_lines():
                    if line:
                        name, _, value = line.partition(": ")
                        fields[name] = value
                        continue
                    self._take(fields)
                    fields = {}
                    events -= 1
                    if self.done or not events:
                        return
        except httpx.TransportError:
            pass

    def _take(self, fields: dict[str, str]) -> None:
        self.last = fields["id"]
        if fields["data"] == "[DONE]":
            self.done = True
            return
        chunk = json.loads(fields["data"])
        self.name, self.usage = chunk["id"], chunk.get("usage")
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in self.ends
            self.text[index] = self.text.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]

    def read_on(self, urls: list[str], limit_s: float = 90) -> None:
        """Wherever somebody answers, until it is done."""
        deadline = time.monotonic() + limit_s
        while not self.done:
            assert time.monotonic() < deadline, self.statuses
            for url in urls:
                if not self.done:
                    self.read(url)
            time.sleep(0.05)
