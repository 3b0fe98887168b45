"""``python -m octavo_gateway``."""

import sys
from collections.abc import Callable

from octavo_shared.entry import service_main
from octavo_shared.settings import GatewaySettings


def load() -> Callable[[GatewaySettings], int]:
    """``octavo_gateway.serve.run``, which is imported once the settings are known to be good: it takes seconds."""
    from octavo_gateway.serve import run

    return run


if __name__ == "__main__":
    sys.exit(service_main("octavo_gateway", GatewaySettings, load))
