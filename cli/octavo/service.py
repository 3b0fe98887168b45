"""`octavo gateway`, `octavo scheduler`, `octavo executor`: one service alone, against an external Redis."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

from octavo.errors import CommandError
from octavo.flags import add_settings, dashed, environment_of, given_flags
from octavo.models import resolve_model, served_name
from octavo_shared.settings import (
    CommonSettings,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    SettingError,
    load_settings,
)

_KINDS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
}
# Its packages are only in the extra of the same name.
_TELLTALE = {"gateway": "fastapi", "scheduler": "redis", "executor": "torch"}


def run_service(name: str, argv: list[str]) -> int:
    """Replace this process by the service: signals and exit status are its own. Raises CommandError."""
    kind = _KINDS[name]
    parser = argparse.ArgumentParser(
        prog=f"octavo {name}",
        epilog="Every flag is also an environment variable: --redis-url is OCTAVO_REDIS_URL. A flag wins.",
    )
    add_settings(parser, [kind])
    flags = given_flags(parser.parse_args(dashed(argv)), [kind])
    if importlib.util.find_spec(_TELLTALE[name]) is None:
        raise CommandError(f"this needs more packages: pip install 'octavo[{name}]'")
    try:
        settings = load_settings(kind, **flags)
    except SettingError as error:
        raise CommandError(str(error)) from error
    environment = {**os.environ, **environment_of({**flags, **_model_values(name, settings)})}
    command = [sys.executable, "-m", f"octavo_{name}"]
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def _model_values(name: str, settings: CommonSettings) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if not settings.served_model_name:
        # The services find each other by this name: all must derive it from what the user typed.
        values["served_model_name"] = [served_name(settings.model)]
    if name != "scheduler":  # which never opens the model
        values["model"] = str(resolve_model(settings.model).path)
    return values
