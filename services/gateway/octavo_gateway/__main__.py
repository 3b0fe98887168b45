"""``python -m octavo_gateway``: settings come from ``OCTAVO_*`` environment variables and ``--name value`` flags."""

from __future__ import annotations

import argparse
import sys

from octavo_gateway.serve import run
from octavo_shared.settings import GatewaySettings, SettingError, load_settings


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """Flags named after the settings; values stay text for the settings to check."""
    parser = argparse.ArgumentParser(prog="octavo_gateway", description="Octavo's HTTP API.")
    for name, field in GatewaySettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, default=None, help=field.description)
    return vars(parser.parse_args(arguments))


def main() -> int:
    """Run the gateway; 2 for settings that cannot be used."""
    try:
        run(load_settings(GatewaySettings, **parse_flags(sys.argv[1:])))
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
