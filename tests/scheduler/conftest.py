"""Lets the scheduler's tests import the helpers that lie beside them, and takes their time as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from log_server import log_server

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey server, emptied before each scene."""
    with log_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url
