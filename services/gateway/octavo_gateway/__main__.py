"""``python -m octavo_gateway``."""

import sys

from octavo_gateway.serve import run
from octavo_shared.entry import service_main
from octavo_shared.settings import GatewaySettings

if __name__ == "__main__":
    sys.exit(service_main("octavo_gateway", GatewaySettings, run))
