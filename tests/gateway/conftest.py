"""Fixtures of the gateway's tests: one Valkey for all, one default gateway per module."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gateway_stage import MODEL_FOLDER, Engine, Stage, default_reply, eventually, open_stage
from log_server import log_server

from octavo_gateway.tokenizer import ModelTokenizer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey server. Tests keep apart by model name."""
    with log_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def tokenizer() -> ModelTokenizer:
    """The default model's tokenizer."""
    if not MODEL_FOLDER.is_dir():
        pytest.skip("the default model has not been fetched (octavo pull)")
    return ModelTokenizer.load(MODEL_FOLDER / "tokenizer.json")


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """Gateways of one process share the default model's tokenizer, which none of them changes: most of what it costs to start
    one is to read that."""
    load, shared = ModelTokenizer.load, functools.cache(ModelTokenizer.load)
    default = MODEL_FOLDER / "tokenizer.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelTokenizer, "load", lambda path: (shared if path == default else load)(path))
        yield


@pytest.fixture(scope="module")
def shared_stage(redis_url: str, tokenizer: ModelTokenizer) -> Iterator[Stage]:
    """A gateway with default settings."""
    with open_stage(redis_url, f"model-{next(_numbers)}") as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The shared gateway with a fresh script; afterwards nothing lives in it."""
    engine: Engine = shared_stage.engine
    engine.reply = default_reply
    engine.records.clear()
    engine.aborts.clear()
    yield shared_stage
    reader = shared_stage.server.gateway.reader
    eventually(lambda: engine.live == 0 and reader.live == 0, "everything ends")
    shared_stage.check()


@pytest.fixture
def make_stage(redis_url: str, tokenizer: ModelTokenizer) -> Callable[..., AbstractContextManager[Stage]]:
    """A gateway with settings of one's own."""
    return lambda **flags: open_stage(redis_url, flags.pop("name", f"model-{next(_numbers)}"), **flags)
