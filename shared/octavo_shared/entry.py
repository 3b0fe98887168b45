"""``python -m octavo_<service>``: settings come from ``OCTAVO_*`` environment variables and ``--name value`` flags."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from octavo_shared.settings import S, SettingError, load_settings

T = TypeVar("T")


def service_main(program: str, kind: type[S], load: Callable[[], Callable[[S], int]]) -> int:
    """Run the service that ``load`` imports with its settings; the exit status, which is 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(prog=program)
    for name, field in kind.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, default=None, help=field.description)
    try:
        # Values stay text for the settings to check.
        settings = load_settings(kind, **vars(parser.parse_args()))
        run = _import_uncollected(load)
        return run(settings)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _import_uncollected(load: Callable[[], T]) -> T:
    """What modules are made of stays for good. To look through it for garbage again and again while it grows is a fifth of
    what torch's import costs; later it would stop a service for a fifth of a second now and then."""
    gc.disable()
    try:
        return load()
    finally:
        gc.freeze()
        gc.enable()
