"""How long admitted requests wait for their first token when ten times as many come as can be served.

A real `octavo serve`. First one client at a time (the unloaded time to first token), then as many at once as it takes to find
out how many requests a second are served, then an open loop: requests arrive at ``--factor`` times that rate, whether or not
those before have been answered. Printed: the 99th percentile of the time to first token of those that were admitted beside the
unloaded one, their ratio, and how many were refused.

How long a queue may be is a matter of ``--max-queued-tokens``: what follows ``--`` goes to `octavo serve`.

Run: python bench/overload.py [MODEL] [--factor 10] [--seconds 20] [-- --max-queued-tokens 600]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from stack import server

PROMPT_WORDS = 48
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: its status, seconds to the first token and to the end (from when it was due)."""

    status: int
    first_s: float
    whole_s: float


async def ask(host: str, port: int, number: int) -> Outcome:
    """One streamed request over a connection of its own."""
    rng = random.Random(number)
    prompt = " ".join(str(rng.randrange(10_000)) for _ in range(PROMPT_WORDS))
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True, "seed": number}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        status = int((await reader.readline()).split()[1])
        first_s = 0.0
        while line := await reader.readline():
            if line.startswith(b"data: {") and not first_s:
                first_s = time.perf_counter() - start_s
        return Outcome(status, first_s, time.perf_counter() - start_s)
    finally:
        writer.close()


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """The three phases."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    for number in range(10):
        await ask(host, port, -number - 1)
    unloaded = [(await ask(host, port, number)).first_s for number in range(arguments.unloaded)]

    served = 0
    end_s = time.perf_counter() + arguments.seconds / 2

    async def client(number: int) -> None:
        nonlocal served
        while time.perf_counter() < end_s:
            served += (await ask(host, port, number)).status == 200
            number += 1000

    start_s = time.perf_counter()
    await asyncio.gather(*(client(1000 + number) for number in range(arguments.concurrency)))
    rate = served / (time.perf_counter() - start_s)

    count = int(rate * arguments.factor * arguments.seconds)
    rng = random.Random(0)
    tasks, due_s = [], time.perf_counter()
    for number in range(count):
        due_s += rng.expovariate(rate * arguments.factor)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(host, port, 10_000 + number)))
    outcomes = await asyncio.gather(*tasks)
    admitted = [one.first_s for one in outcomes if one.status == 200]
    refused = sum(one.status == 429 for one in outcomes)
    print(f"unloaded             p99 {p99(unloaded) * 1000:.0f} ms to the first token, one at a time")
    print(f"served               {rate:.1f} requests/s with {arguments.concurrency} clients")
    print(f"offered              {rate * arguments.factor:.1f} requests/s for {arguments.seconds:.0f} s")
    print(
        f"admitted             {len(admitted)}, refused with 429 {refused}, other {len(outcomes) - len(admitted) - refused}"
    )
    print(f"overloaded           p99 {p99(admitted) * 1000:.0f} ms, median {statistics.median(admitted) * 1000:.0f} ms")
    print(f"ratio                {p99(admitted) / p99(unloaded):.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--unloaded", type=int, default=100)
    arguments, flags = parser.parse_known_args()
    with server(*([arguments.model] if arguments.model else []), *(flag for flag in flags if flag != "--")) as url:
        asyncio.run(measure(url, arguments))


if __name__ == "__main__":
    main()
