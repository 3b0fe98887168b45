"""`octavo bench serve`: load an OpenAI-compatible server and say how fast it is. Flags are named as vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Coroutine, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from octavo.bench.http import ConnectionPool, HttpError, Target
from octavo.bench.load import Outcome, PreparedRequest, Workload, arrival_times, prepare, run_load, send
from octavo.bench.report import METRICS, details, print_report, summarise
from octavo.errors import CommandError

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `octavo bench serve`."""
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="server or API base URL; wins over --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="server's address (default %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="server's port (default %(default)s)")
    server.add_argument("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    server.add_argument("--model", help="model to name in requests (default: the first the server lists)")
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="extra request header")
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="wait this long for the server (default: do not)"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--dataset-name", choices=("random",), default="random", help="where prompts come from")
    load.add_argument("--num-prompts", type=_positive, default=1000, help="requests to send (default %(default)s)")
    load.add_argument("--request-rate", type=_rate, default=float("inf"), help="requests per second (default: inf)")
    load.add_argument("--burstiness", type=_positive_float, default=1.0, help="arrivals: 1 Poisson, >1 more even")
    load.add_argument("--max-concurrency", type=_positive, help="most requests in flight at once")
    load.add_argument("--num-warmups", type=int, default=0, help="requests sent before the clock starts")
    load.add_argument("--seed", type=int, default=0, help="equal seeds give equal prompts (default %(default)s)")
    load.add_argument("--ignore-eos", action="store_true", help="always generate the full output length")
    load.add_argument("--temperature", type=float, help="sampling temperature (default: the server's)")
    prompts = parser.add_argument_group("random prompts")
    prompts.add_argument("--random-input-len", type=_positive, default=1024, help="prompt tokens (default %(default)s)")
    prompts.add_argument("--random-output-len", type=_positive, default=128, help="output tokens (default %(default)s)")
    prompts.add_argument("--random-range-ratio", type=_ratio, default=0.0, help="lengths vary by this share [0, 1)")
    prompts.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts share in front")
    prompts.add_argument("--random-vocab-size", type=_positive, help="token ids are drawn below this (default 10000)")
    prompts.add_argument("--prompt-as-text", action="store_true", help="send text instead of token ids")
    prompts.add_argument("--tokenizer", help="folder with tokenizer.json: its vocabulary, and text of exact length")
    result = parser.add_argument_group("results")
    result.add_argument("--percentile-metrics", type=_metrics, default="ttft,tpot,itl,e2el", help="rows of the table")
    result.add_argument("--metric-percentiles", type=_percentiles, default="50,90,99", help="columns of the table")
    result.add_argument("--save-result", action="store_true", help="write the figures to a JSON file")
    result.add_argument("--save-detailed", action="store_true", help="... with every request's own figures")
    result.add_argument("--result-dir", type=Path, default=Path(), help="folder of that file (default: here)")
    result.add_argument("--result-filename", help="its name (default: from rate, model and time)")
    result.add_argument("--metadata", action="append", default=[], metavar="KEY=VALUE", help="noted in the file")
    result.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a request failed. Raises CommandError."""
    return _run_fast(_bench(args))


def _run_fast(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _bench(args: argparse.Namespace) -> int:
    target = _target(args)
    pool = ConnectionPool(target)
    try:
        model = args.model or await _first_model(pool, args.ready_check_timeout_sec)
        requests = prepare(_workload(args), target, args.endpoint, model)
        await _check(pool, requests[0], args.ready_check_timeout_sec)
        await asyncio.gather(*(send(pool, requests[i % len(requests)]) for i in range(args.num_warmups)))
        due_s = arrival_times(len(requests), args.request_rate, args.burstiness, args.seed)
        outcomes, duration_s, cpu_s = await _timed_run(args, pool, requests, due_s)
    finally:
        pool.close()
    figures = summarise(outcomes, duration_s, cpu_s, args.metric_percentiles)
    console = Console()
    print_report(console, figures, args.percentile_metrics, args.metric_percentiles)
    errors = [o.error for o in outcomes if o.error]
    if errors:
        console.print(f"[red]{len(errors)} requests failed[/red]; the first: {errors[0]}", highlight=False)
    if args.save_result or args.save_detailed:
        console.print(f"Wrote {_save(args, model, figures, outcomes)}", highlight=False)
    return 1 if errors else 0


def _target(args: argparse.Namespace) -> Target:
    headers = dict(_pair("--header", text) for text in args.header)
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    target = Target.parse(args.base_url or f"http://{args.host}:{args.port}", headers)
    if target.prefix.endswith("/v1") and args.endpoint.startswith("/v1"):
        # OpenAI clients are given a base URL with /v1, vLLM's benchmark one without: take both.
        return Target(target.host, target.port, target.tls, target.prefix[: -len("/v1")], target.headers)
    return target


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        num_prompts=args.num_prompts,
        input_tokens=args.random_input_len,
        output_tokens=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_tokens=args.random_prefix_len,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        as_text=args.prompt_as_text,
        tokenizer=args.tokenizer,
        vocabulary=args.random_vocab_size,
        seed=args.seed,
    )


async def _first_model(pool: ConnectionPool, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answer = json.loads(await pool.exchange(pool.target.request("GET", "/v1/models")))
            return str(answer["data"][0]["id"])
        except HttpError as error:
            if time.monotonic() >= deadline:
                raise CommandError(f"cannot list the server's models: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise CommandError("the server's /v1/models names no model; give --model") from error
        await asyncio.sleep(0.2)


async def _check(pool: ConnectionPool, request: PreparedRequest, patience_s: float) -> None:
    """One request before the clock starts, so that a wrong flag is one message and not a thousand."""
    deadline = time.monotonic() + patience_s
    while (outcome := await send(pool, request)).error:
        if time.monotonic() >= deadline:
            raise CommandError(f"the test request failed: {outcome.error}")
        await asyncio.sleep(0.2)


async def _timed_run(
    args: argparse.Namespace, pool: ConnectionPool, requests: list[PreparedRequest], due_s: list[float]
) -> tuple[list[Outcome], float, float]:
    columns = (TextColumn("Requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Drawing costs processor time that the server under test may need: twice a second is enough.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, disable=args.disable_tqdm) as progress:
        bar = progress.add_task("requests", total=len(requests))
        cpu_s = time.process_time()
        outcomes, duration_s = await run_load(
            pool, requests, due_s, args.max_concurrency, lambda outcome: progress.advance(bar)
        )
        return outcomes, duration_s, time.process_time() - cpu_s


def _save(args: argparse.Namespace, model: str, figures: dict[str, object], outcomes: list[Outcome]) -> Path:
    now = datetime.now()
    rate: float | str = args.request_rate if args.request_rate != float("inf") else "inf"
    document: dict[str, object] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "endpoint": args.endpoint,
        "num_prompts": args.num_prompts,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **dict(_pair("--metadata", text) for text in args.metadata),
        **figures,
    }
    if args.save_detailed:
        document |= details(outcomes)
    name = args.result_filename or f"octavo-{rate}qps-{Path(model).name}-{document['date']}.json"
    path: Path = args.result_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"{flag}: {text!r} is not NAME=VALUE")
    return name, value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be greater than 0, or inf")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be in [0, 1)")
    return value


def _metrics(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown metric {unknown[0]}; known: {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> Sequence[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("percentiles lie between 0 and 100")
    return values
