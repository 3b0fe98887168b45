"""Who shares cached prefixes with whom: tenants, salts and the operator's scope, as the executor gets to see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_stage import Stage, play

# Prompts of 40 tokens on blocks of 16: two can be found.
FOUND = 32


@pytest.mark.parametrize(
    ("scope", "first", "second", "found"),
    [
        ("tenant", ("t-1", ""), ("t-1", ""), FOUND),
        ("tenant", ("t-1", ""), ("t-2", ""), 0),
        ("tenant", ("t-1", "s"), ("t-1", "s"), FOUND),
        ("tenant", ("t-1", "s"), ("t-1", "r"), 0),
        ("tenant", ("t-1", "s"), ("t-1", ""), 0),
        ("tenant", ("t-1", "s"), ("t-2", "s"), 0),
        # What is one's tenant and what is one's salt cannot be confused.
        ("tenant", ("t-1", "2"), ("t-12", ""), 0),
        ("global", ("t-1", ""), ("t-2", ""), FOUND),
        ("global", ("t-1", "s"), ("t-2", "s"), FOUND),
        ("global", ("t-1", "s"), ("t-2", ""), 0),
        ("request", ("t-1", ""), ("t-1", ""), 0),
        ("request", ("t-1", "s"), ("t-1", "s"), 0),
    ],
)
def test_a_prefix_is_found_by_whom_it_may(
    valkey: str, tmp_path: Path, scope: str, first: tuple[str, str], second: tuple[str, str], found: int
) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            for serial, (tenant, salt) in enumerate((first, second), 1):
                await stage.admit(serial, prompt_tokens=40, tenant=tenant, cache_salt=salt)
                await stage.finish(executor)
            assert [new.num_computed for new in executor.admitted] == [0, found]

    play(scene, valkey, tmp_path, prefix_cache_scope=scope)
