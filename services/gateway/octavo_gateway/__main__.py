"""``python -m octavo_gateway``."""

import sys

from octavo_shared.entry import service_main
from octavo_shared.settings import GatewaySettings


def run(settings: GatewaySettings) -> int:
    """As ``octavo_gateway.serve.run``, which is imported once the settings are known to be good: it takes seconds."""
    from octavo_gateway.serve import run

    return run(settings)


if __name__ == "__main__":
    sys.exit(service_main("octavo_gateway", GatewaySettings, run))
