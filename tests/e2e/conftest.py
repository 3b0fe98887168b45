"""Fixtures of the end-to-end tests: the default model, and stacks that serve it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.models import resolve_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from e2e_stack import Stack
from log_server import debians_redis, log_server
from service_set import find_free_port
from tiny_models import save_tiny_model


class SmallModel(NamedTuple):
    """Its folder, and transformers' own of it."""

    folder: Path
    theirs: Any


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, converted once."""
    return resolve_model(None).path


@pytest.fixture(scope="session")
def small_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A tiny random model with the default model's tokenizer: for what does not depend on what is said."""
    folder = tmp_path_factory.mktemp("small")
    theirs = save_tiny_model("llama", folder, vocab_size=49152, max_position_embeddings=2048, pad_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    return SmallModel(folder, theirs)


@pytest.fixture(scope="session")
def start_any() -> Iterator[Callable[..., Stack]]:
    """Start stacks on any model with any flags; all are stopped in the end."""
    stacks: list[Stack] = []

    def start(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> Stack:
        stack = Stack(str(folder), *flags, environment=environment)
        stacks.append(stack)
        return stack

    yield start
    for stack in stacks:
        stack.stop()


@pytest.fixture(scope="session")
def start_stack(start_any: Callable[..., Stack], model_folder: Path) -> Callable[..., Stack]:
    """Start stacks on the default model."""
    return partial(start_any, model_folder)


@pytest.fixture(scope="session")
def start_small(start_any: Callable[..., Stack], small_model: SmallModel) -> Callable[..., Stack]:
    """Start stacks on the small model, served as ``m``."""
    return partial(start_any, small_model.folder, "--served-model-name", "m", "--num-threads", "1")


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., Stack]) -> Stack:
    """A stack with default settings that tests share; each leaves it idle. On a busy machine requests may have to wait for long."""
    return start_stack("--max-queue-wait", "0")


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    return find_free_port()


@pytest.fixture(scope="module")
def module_port() -> int:
    """One for a whole module."""
    return find_free_port()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis of one's own: Debian's where there is one, else the bundled Valkey."""
    with log_server(tmp_path, binary=debians_redis()) as url:
        yield url


@pytest.fixture(scope="module")
def module_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for a whole module."""
    with log_server(tmp_path_factory.mktemp("redis"), binary=debians_redis()) as url:
        yield url
