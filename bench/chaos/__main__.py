"""`make chaos`: does every stream survive, whatever dies? Seeds are printed; the exit status is 0 iff the promise was kept."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from pathlib import Path

from chaos_client import Clients, Told
from chaos_faults import Fault, Saboteur
from chaos_jobs import Job, make_jobs
from chaos_model import write_model
from chaos_pace import due, overcome, recovery_s
from chaos_stack import MODEL, ChaosStack, Sizes
from chaos_verdict import Verdict, find_leaks

from octavo.models import resolve_model


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="how many")
    parser.add_argument("--requests", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="of requests and faults (default: drawn, and printed)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one overcome to the next, on average")
    parser.add_argument("--at-once", type=int, default=10, help="clients")
    parser.add_argument(
        "--only", action="append", default=[], help="only faults whose names begin so (again and again)"
    )
    parser.add_argument("--fsync", default="always", choices=["always", "everysec"], help="Redis' appendfsync")
    parser.add_argument(
        "--keep", type=Path, default=None, help="folder for the services' output (default: a temporary one)"
    )
    parser.add_argument(
        "--model", default="", help="folder or hub id, or 'default' (default: a random one of two layers)"
    )
    parser.add_argument("--tokens", type=int, default=288, help="of a choice's output, at most (at least 16)")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds within which every answer must have ended"
    )
    args = parser.parse_args()
    args.seed = random.randrange(1 << 31) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(args, folder))


async def run(args: argparse.Namespace, folder: Path) -> int:
    """One run: the reference, then the same under faults, then the verdict."""
    print(f"seed {args.seed}: {args.requests} requests, up to {args.faults} faults", flush=True)
    jobs = make_jobs(args.requests, args.seed, args.tokens)
    stack = ChaosStack(folder, _model(args.model, folder), Sizes(appendfsync=args.fsync))
    saboteur = Saboteur(stack, args.seed, args.only)
    redis = stack.connect_redis()
    verdict = Verdict()
    try:
        await stack.start()
        start_s = time.monotonic()
        reference = await _clients(stack, args, args.seed).play(jobs, args.at_once)
        _say_failures("the reference run", reference)
        print(f"reference: {time.monotonic() - start_s:.1f} s", flush=True)
        start_s = time.monotonic()
        told = await _play_disturbed(stack, saboteur, jobs, args)
        print(f"under faults: {time.monotonic() - start_s:.1f} s, {len(saboteur.happened)} faults", flush=True)
        await stack.until_ready()
        verdict.compare(reference, told)
        verdict.leaks = await find_leaks(redis, stack.gateway_port(0), MODEL)
        surprises = [line for process in stack.services for line in process.surprises]
    finally:
        await saboteur.close()
        await redis.aclose()
        statuses = await stack.stop()
    # Whoever is told to stop while it still starts has nothing to put in order yet, and ends by the signal.
    in_order = (0, -signal.SIGTERM)
    verdict.leaks += [
        f"{name} stopped with status {status}" for name, status in statuses.items() if status not in in_order
    ]
    report(verdict, saboteur.happened, told)
    for line in surprises:
        print(f"ended: {line}")
    print("the promise was kept" if verdict.good else f"BROKEN; again with --seed {args.seed}", flush=True)
    return 0 if verdict.good else 1


async def _play_disturbed(
    stack: ChaosStack, saboteur: Saboteur, jobs: list[Job], args: argparse.Namespace
) -> list[Told]:
    clients = _clients(stack, args, args.seed + 1)
    start_s = time.monotonic()

    def say(fault: Fault) -> None:
        number, spent_s = len(saboteur.happened), time.monotonic() - start_s
        with (stack.folder / "faults.txt").open("a") as file:
            began = datetime.now() - timedelta(seconds=time.monotonic() - fault.began_s)
            file.write(f"{began:%H:%M:%S.%f} {fault.ended_s - fault.began_s:.1f} s {fault.name} {fault.detail}\n")
        if number % 25 == 0:
            failed = sum(bool(one.failure) for one in clients.told)
            print(f"  {spent_s:.0f} s: {number} faults, {len(clients.told)} requests, {failed} failed", flush=True)

    playing = asyncio.create_task(
        clients.play(jobs, args.at_once, lambda: due(len(jobs), args.faults, len(saboteur.happened)))
    )
    await saboteur.work(
        args.faults, args.every, lambda: not playing.done(), lambda fault: overcome(fault, clients.told, stack), say
    )
    return await playing


def _model(name: str, folder: Path) -> Path:
    return resolve_model(None if name == "default" else name).path if name else write_model(folder / "model")


def _clients(stack: ChaosStack, args: argparse.Namespace, seed: int) -> Clients:
    return Clients(stack.gateway_port, stack.sizes.gateways, seed, args.patience)


def _say_failures(what: str, told: list[Told]) -> None:
    if failures := [one for one in told if one.failure]:
        raise SystemExit(f"{what} failed for {len(failures)} requests: {failures[0].job} {failures[0].failure}")


def report(verdict: Verdict, faults: list[Fault], told: list[Told]) -> None:
    """Print it all."""
    happened = Counter(fault.name for fault in faults)
    print("faults: " + ", ".join(f"{count} {name}" for name, count in sorted(happened.items())))
    counts: Counter[str] = Counter()
    for one in told:
        counts.update(one.counts)
    print(
        f"clients: {counts['not now']} times asked to come again, {counts['unanswered']} connections without an answer, "
        f"{counts['broken']} broken in the middle of one, of which {counts['begun again']} could only begin again"
    )
    for name in ("lost", "ends", "different", "ties", "leaks"):
        lines = getattr(verdict, name)
        print(f"{name}: {len(lines)}")
        for line in lines[:20]:
            print(f"  {line}")
    recovery: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        if (gap_s := recovery_s(fault, told)) is not None:
            recovery[fault.name].append(gap_s)
            recovery["all"].append(gap_s)
    print("time to recover (from a fault to the end of the longest silence of a stream that it met), seconds:")
    for name, gaps in sorted(recovery.items()):
        print(f"  {name:22} {len(gaps):4} times  p50 {_quantile(gaps, 0.5):6.2f}  p99 {_quantile(gaps, 0.99):6.2f}")


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    sys.exit(main())
