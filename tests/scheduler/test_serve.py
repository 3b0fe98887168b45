"""What a scheduler does side by side ends together, and no error is left for the garbage collector to complain of."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from octavo_scheduler.serve import ReignOverError, _until_first


async def fail(error: Exception) -> None:
    raise error


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ConnectionError("the line broke just then")


def test_several_ends_at_once_are_one(caplog: pytest.LogCaptureFixture) -> None:
    complaints: list[dict[str, Any]] = []

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        with pytest.raises(ReignOverError, match="one"):
            await _until_first(
                fail(ReignOverError("one")), fail(ReignOverError("two")), fail_when_cancelled(), asyncio.Event().wait()
            )
        gc.collect()
        await asyncio.sleep(0)

    with caplog.at_level(logging.INFO):
        asyncio.run(scene())
    assert complaints == []
    assert "two" in caplog.text
    assert "the line broke just then" in caplog.text


def test_the_first_to_end_ends_the_others() -> None:
    async def scene() -> None:
        waiting = asyncio.Event()
        await _until_first(asyncio.sleep(0), waiting.wait())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scene())
