"""How long admitted requests wait for their first token when ten times as many come as can be served.

A real `octavo serve`. First one client at a time (the unloaded time to first token), then several at once, each with a request at
any time, to find out how many requests a second are served, then an open loop: requests arrive at ``--factor`` times that rate,
whether or not those before have been answered. The first ``--settle`` seconds of it are not counted: a burst is let in until
requests would wait for ``--max-queue-wait`` (30 s), and has to be worked off: give a shorter one, or settle for longer. Printed are the times to first token of those that
were admitted afterwards beside the unloaded ones, what was served of what came, and what refusing cost the gateway.

What follows ``--`` goes to `octavo serve`.

Run: python bench/overload.py [MODEL] [--factor 10] [--seconds 30] [-- --max-queue-wait 10]
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


async def closed_loop(host: str, port: int, clients: int, seconds: float) -> float:
    """Requests a second that ``clients`` get answered, each with one at any time."""
    served = 0
    end_s = time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal served
        while time.perf_counter() < end_s:
            outcome = await ask(host, port, number)
            served += outcome.status == 200
            number += 1000

    start_s = time.perf_counter()
    await asyncio.gather(*(client(1000 + number) for number in range(clients)))
    return served / (time.perf_counter() - start_s)


async def open_loop(host: str, port: int, rate: float, seconds: float, start: int) -> list[Outcome]:
    """Requests that arrive at ``rate`` a second, at random."""
    rng = random.Random(start)
    tasks: list[asyncio.Task[Outcome]] = []
    due_s = time.perf_counter()
    for number in range(int(rate * seconds)):
        due_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(host, port, start + number)))
    # Those that were let in before it began are not waited for: what is counted is what a lasting load gets.
    return await asyncio.gather(*tasks)


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """The phases."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    for number in range(10):
        await ask(host, port, 500 + number)
    unloaded = [(await ask(host, port, number)).first_s for number in range(arguments.unloaded)]
    print(f"unloaded             {spread(unloaded)} to the first token, one at a time", flush=True)
    rate = await closed_loop(host, port, arguments.concurrency, arguments.seconds / 2)
    print(f"served               {rate:.2f} requests/s with {arguments.concurrency} clients", flush=True)
    offered = rate * arguments.factor
    settling = asyncio.create_task(open_loop(host, port, offered, arguments.settle, 10_000))
    await asyncio.sleep(arguments.settle)
    outcomes = await open_loop(host, port, offered, arguments.seconds, 1_000_000)
    burst = await settling
    admitted = [one.first_s for one in outcomes if one.status == 200]
    refused = [one.whole_s for one in outcomes if one.status == 429]
    before = [one.first_s for one in burst if one.status == 200]
    print(f"offered              {offered:.1f} requests/s for {arguments.seconds:.0f} s")
    others = len(outcomes) - len(admitted) - len(refused)
    print(f"admitted             {len(admitted)}, refused with 429 {len(refused)}, other {others}")
    print(f"overloaded           {spread(admitted)} to the first token")
    print(f"ratio of p99         {p99(admitted) / p99(unloaded):.2f}")
    print(f"ratio of p50         {statistics.median(admitted) / statistics.median(unloaded):.2f}")
    print(
        f"goodput              {len(admitted) / arguments.seconds / rate:.2f} of what {arguments.concurrency} clients get"
    )
    print(f"refusals             {spread(refused)} until the 429")
    print(f"while it settled     {len(before)} admitted, {spread(before)} to the first token")


def spread(values: list[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    if not values:
        return "none"
    return f"p50 {statistics.median(values) * 1000:.0f} ms, p99 {p99(values) * 1000:.0f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=25.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--unloaded", type=int, default=100)
    arguments, flags = parser.parse_known_args()
    with server(*([arguments.model] if arguments.model else []), *(flag for flag in flags if flag != "--")) as url:
        asyncio.run(measure(url, arguments))


if __name__ == "__main__":
    main()
