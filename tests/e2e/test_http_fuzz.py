"""The OpenAPI schema, fuzzed against a running stack (schemathesis): every answer is one that the schema tells of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from e2e_stack import Stack
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SMALL = ("--max-model-len", "64", "--num-gpu-blocks-override", "64", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def fuzzed(start_small: Callable[..., Stack]) -> Stack:
    return start_small(*SMALL, "--max-n", "4", "--max-num-prompts", "4")


def fuzz(stack: Stack, examples: int) -> int:
    """Try every operation with so many made-up requests; returns the number of operations."""
    schema = schemathesis.openapi.from_url(f"{stack.url}/openapi.json")
    count = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        count += 1

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def attack(case: Any) -> None:
            case.call_and_validate(base_url=stack.url, checks=CHECKS, timeout=60)

        attack()
    return count


def lives(stack: Stack) -> None:
    """Nothing is left of it, and requests are served as ever."""
    stack.wait_idle(60)
    answer = httpx.post(
        f"{stack.url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True}, timeout=60
    )
    assert answer.json()["usage"]["completion_tokens"] == 3
    restarted = [line for line in stack.lines if "again" in line or "Traceback" in line or " failed" in line]
    assert restarted == []


def test_the_schema_tells_every_answer(fuzzed: Stack) -> None:
    assert fuzz(fuzzed, 15) >= 12
    lives(fuzzed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_schema_tells_every_answer_long(fuzzed: Stack) -> None:
    fuzz(fuzzed, 400)
    lives(fuzzed)
