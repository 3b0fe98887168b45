"""``python -m octavo_<service>``: settings come from ``OCTAVO_*`` environment variables and ``--name value`` flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from octavo_shared.settings import S, SettingError, load_settings


def service_main(program: str, kind: type[S], run: Callable[[S], int]) -> int:
    """Run a service with its settings; the exit status, which is 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(prog=program)
    for name, field in kind.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, default=None, help=field.description)
    try:
        # Values stay text for the settings to check.
        return run(load_settings(kind, **vars(parser.parse_args())))
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
