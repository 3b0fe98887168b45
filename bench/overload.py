"""How long admitted requests wait for their first token when ten times as many come as can be served.

A real `octavo serve`. First one client at a time (the unloaded time to first token), then several at once, each with a request at
any time, to find out how many requests a second are served, then an open loop: requests arrive at ``--factor`` times that rate,
whether or not those before have been answered; with ``--ramp`` their rate grows from nothing to that in so many seconds. Printed
are the times to first token of those that were admitted beside the unloaded ones: of all, and of those that came after the first
``--settle`` seconds (of a ramp, for instance). Then what was served of what came, and how long refusing took: in the first seconds,
until overload is told from a burst, that is longer.

What follows ``--`` goes to `octavo serve`.

Run: python bench/overload.py [MODEL] [--factor 10] [--seconds 120] [--settle 30] [--ramp 0] [-- --max-queue-wait 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from stack import server

PROMPT_WORDS = 48
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: its status, seconds to the first token and to the end, and when it came (seconds into the load)."""

    status: int
    first_s: float
    whole_s: float
    came_s: float = 0.0


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


async def open_loop(host: str, port: int, rate: float, seconds: float, ramp_s: float) -> list[Outcome]:
    """Requests that arrive at random, ``rate`` a second once ``ramp_s`` are over; all are waited for."""
    rng = random.Random(1)
    start_s = time.perf_counter()

    async def one(number: int, came_s: float) -> Outcome:
        return replace(await ask(host, port, number), came_s=came_s)

    tasks: list[asyncio.Task[Outcome]] = []
    # Arrivals of a rate of 1, stretched: ``due`` have been due after sqrt(2 due ramp_s / rate) seconds of a ramp.
    due = rng.expovariate(1.0)
    while True:
        in_ramp = rate * ramp_s / 2
        came_s = math.sqrt(2 * due * ramp_s / rate) if due < in_ramp else ramp_s + (due - in_ramp) / rate
        if came_s >= seconds:
            return await asyncio.gather(*tasks)
        await asyncio.sleep(max(0.0, start_s + came_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(10_000 + len(tasks), came_s)))
        due += rng.expovariate(1.0)


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """The phases."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    for number in range(10):
        await ask(host, port, 500 + number)
    unloaded = [(await ask(host, port, number)).first_s for number in range(arguments.unloaded)]
    print(f"unloaded             {spread(unloaded)} to the first token, one at a time", flush=True)
    rate = await closed_loop(host, port, arguments.concurrency, arguments.calibrate)
    print(f"served               {rate:.2f} requests/s with {arguments.concurrency} clients", flush=True)
    offered = rate * arguments.factor
    whole_s = arguments.settle + arguments.seconds
    outcomes = await open_loop(host, port, offered, whole_s, arguments.ramp)
    grows = f", reached after {arguments.ramp:.0f} s" if arguments.ramp else ""
    print(f"offered              {offered:.1f} requests/s for {whole_s:.0f} s{grows}")
    refused = [one.whole_s for one in outcomes if one.status == 429]
    print(f"refusals             {spread(refused)} until the 429")
    for name, since_s in (("from the first second", 0.0), (f"after {arguments.settle:.0f} s", arguments.settle)):
        came = [one for one in outcomes if one.came_s >= since_s]
        first = [one.first_s for one in came if one.status == 200]
        late = sum(one > 2 * p99(unloaded) for one in first)
        others = sum(one.status not in (200, 429) for one in came)
        print(f"{name}:")
        print(f"  came               {len(came)}, admitted {len(first)}, other than 200 and 429 {others}")
        print(
            f"  admitted           {spread(first)}, at most {max(first, default=0.0) * 1000:.0f} ms to the first token"
        )
        print(f"  over twice         {late} took more than twice the unloaded p99")
        print(f"  ratio of p99       {p99(first) / p99(unloaded):.2f}")
        print(f"  ratio of p50       {statistics.median(first) / statistics.median(unloaded):.2f}")
        served = len(first) / (whole_s - since_s) / rate
        print(f"  goodput            {served:.2f} of what {arguments.concurrency} clients get", flush=True)


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
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--settle", type=float, default=30.0)
    parser.add_argument("--ramp", type=float, default=0.0)
    parser.add_argument("--calibrate", type=float, default=20.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--unloaded", type=int, default=100)
    arguments, flags = parser.parse_known_args()
    with server(*([arguments.model] if arguments.model else []), *(flag for flag in flags if flag != "--")) as url:
        asyncio.run(measure(url, arguments))


if __name__ == "__main__":
    main()
