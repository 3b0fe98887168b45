"""The `octavo` command. Each subcommand imports what it needs when it is chosen, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from octavo.errors import CommandError
from octavo.home import octavo_home


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its line in the help and the function that runs it with the words after its name."""

    summary: str
    run: Callable[[list[str]], int]


def _serve(argv: list[str]) -> int:
    from octavo.flags import add_settings, dashed
    from octavo.stack import KINDS, serve

    parser = argparse.ArgumentParser(
        prog="octavo serve",
        description="Serve a model over an OpenAI-compatible HTTP API: log, scheduler, executor and gateway in one.",
        epilog="Every flag is also an environment variable: --max-num-seqs is OCTAVO_MAX_NUM_SEQS. A flag wins.",
    )
    _add_model(parser)
    _add_fetching(parser)
    add_settings(parser, KINDS)
    return serve(_parse(parser, dashed(argv)))


def _service(kind_name: str) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        from octavo.service import run_service

        return run_service(kind_name, argv)

    return run


def _bench(argv: list[str]) -> int:
    if argv[:1] != ["serve"]:
        print("usage: octavo bench serve [flags]\n\nserve  load an OpenAI-compatible server and measure it")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    from octavo.bench import serve
    from octavo.flags import dashed

    parser = argparse.ArgumentParser(
        prog="octavo bench serve", description="Load an OpenAI-compatible server and measure it."
    )
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(dashed(argv[1:])))


def _pull(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="octavo pull", description="Fetch (and convert) a model without serving it; prints its folder."
    )
    _add_model(parser)
    _add_fetching(parser)
    args = _parse(parser, argv)
    from octavo.models import resolve_model

    print(resolve_model(args.model, revision=args.revision, gguf_dtype=args.gguf_dtype).path)
    return 0


def _convert(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="octavo convert", description="Convert a GGUF file to a Hugging Face folder; prints the folder."
    )
    parser.add_argument("file", help="the .gguf file")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="[float32]")
    args = parser.parse_args(argv)
    from pathlib import Path

    from octavo.errors import ModelError
    from octavo.gguf_store import convert_gguf_file

    path = Path(args.file).expanduser()
    if not path.is_file():
        raise ModelError(f"no such file: {path}")
    print(convert_gguf_file(path, args.dtype))
    return 0


def _keys(argv: list[str]) -> int:
    from octavo.keys import make_key

    return make_key(argv)


def _certs(argv: list[str]) -> int:
    from octavo.certs import make_certs

    return make_certs(argv)


COMMANDS = {
    "serve": Command("serve a model: everything in one", _serve),
    "gateway": Command("run the HTTP API alone", _service("gateway")),
    "scheduler": Command("run the scheduler alone", _service("scheduler")),
    "executor": Command("run an executor alone", _service("executor")),
    "bench": Command("measure a server (octavo bench serve)", _bench),
    "pull": Command("fetch and convert a model without serving it", _pull),
    "convert": Command("convert a GGUF file", _convert),
    "keys": Command("make an API key for a tenant", _keys),
    "certs": Command("make certificates to try TLS with", _certs),
}


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face folder, .gguf file or hub id (default: SmolLM2-135M-Instruct, fetched once)",
    )


def _add_fetching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fetching")
    group.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--gguf-dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the weights a GGUF file is converted to [float32]",
    )


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, with MODEL given by place or as --model but not both ways."""
    args = parser.parse_args(argv)
    if args.model_argument is not None and getattr(args, "model", None) is not None:
        parser.error("MODEL is given twice, by place and as --model")
    args.model = args.model_argument if args.model_argument is not None else getattr(args, "model", None)
    return args


def _usage() -> str:
    lines = ["usage: octavo COMMAND [flags]", "", "An open LLM serving system.", "", "commands:"]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`octavo COMMAND --help` lists a command's flags."])


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"octavo {version('octavo')}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"octavo: no command {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    # Ending by SIGTERM must clean up what ending by Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return command.run(words[1:])
    except CommandError as error:
        print(f"octavo {words[0]}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        home = octavo_home()
        if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(home):
            raise
        reason = f"{error.strerror}: {error.filename}" if str(error.filename) != str(home) else error.strerror
        print(f"octavo {words[0]}: OCTAVO_HOME: {home} cannot be used ({reason})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
