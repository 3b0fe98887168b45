"""Memory that is shared over HTTP: choices of a request, prefixes of a tenant; and what is never shared."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from e2e_stack import RawStream, Stack

PROMPT = np.random.default_rng(8).integers(100, 40000, 500).tolist()
DRAWN = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}


def headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def complete(stack: Stack, *, key: str | None = None, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers(key), timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(stack: Stack, prompt: list[int], **more: Any) -> int:
    """How many tokens of a prompt were found, as the answer says."""
    usage = complete(stack, prompt=prompt, max_tokens=1, **more)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def kv(stack: Stack, key: str | None = None, **query: Any) -> dict[str, Any]:
    answer = httpx.get(f"{stack.url}/v1/kv", params=query, headers=headers(key), timeout=20)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def stack(start_small: Callable[..., Stack]) -> Iterator[Stack]:
    """No keys: everyone is one tenant, and whoever is on this machine an administrator."""
    stack = start_small("--max-model-len", "1024", "--max-num-seqs", "32", "--enable-prompt-tokens-details")
    yield stack
    stack.wait_idle()
    stack.stop()


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 31, 32, 33, 500])
def test_eight_choices_are_eight_requests(stack: Stack, length: int) -> None:
    seed = 2**63 - 4
    together = complete(stack, prompt=PROMPT[:length], n=8, seed=seed, **DRAWN)["choices"]
    assert [choice["index"] for choice in together] == list(range(8))
    assert len({choice["text"] for choice in together}) == 8
    for i, choice in enumerate(together):
        (alone,) = complete(stack, prompt=PROMPT[:length], seed=seed + i, **DRAWN)["choices"]
        assert choice["text"] == alone["text"]
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
        np.testing.assert_allclose(
            choice["logprobs"]["token_logprobs"], alone["logprobs"]["token_logprobs"], rtol=0, atol=1e-4
        )


def test_best_of_gives_the_likeliest_back(stack: Stack) -> None:
    """Ranked by mean log-probability, as if all had been asked for."""
    body = {**DRAWN, "prompt": PROMPT[:40], "seed": 77, "stop": ["e"], "temperature": 1.5}
    all_of_them = complete(stack, n=6, **body)
    means = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in all_of_them["choices"]]
    ranking = sorted(range(6), key=lambda i: -means[i])
    assert ranking != list(range(6))
    best = complete(stack, n=3, best_of=6, **body)
    texts = [choice["text"] for choice in all_of_them["choices"]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in best["choices"]] == [texts[i] for i in ranking[:3]]
    assert best["usage"]["completion_tokens"] == all_of_them["usage"]["completion_tokens"]
    del body["logprobs"]
    silent = complete(stack, n=3, best_of=6, **body)["choices"]
    assert [(choice["text"], choice["logprobs"]) for choice in silent] == [(texts[i], None) for i in ranking[:3]]


def test_eight_choices_hold_hardly_more_than_one(stack: Stack) -> None:
    """What the memory holds while they run: 31 blocks of the prompt are there once, whoever names them."""
    stack.wait_idle()
    held = {}
    for n in (1, 8):
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "n": n, "stream": True}
        request = RawStream(stack, {**body, "seed": 5})
        deadline = time.monotonic() + 20
        # Until everyone has written into a second block.
        while (page := kv(stack))["totals"]["active_blocks"] <= 31 + n:
            assert time.monotonic() < deadline
        request.cut()
        totals, columns = page["totals"], page["columns"]
        held[n] = totals["active_blocks"]
        owners = [names for names in columns["owners"] if names]
        assert len(owners) == totals["active_blocks"]
        assert sum(len(names) == n for names in owners) >= 31
        assert totals["shared_blocks"] == (31 if n > 1 else 0)
        assert totals["saved_blocks"] == 31 * (n - 1)
        assert totals["external_waste_tokens"] == 0
        stack.wait_idle()
    # Without sharing it would be 8 times as much.
    assert held[8] < 2 * held[1]


# --- the cache, seen and emptied --------------------------------------------------------------------------------------


def test_a_reset_forgets_everything(stack: Stack) -> None:
    stack.wait_idle()
    prompt = PROMPT[::-1]
    assert (cached(stack, prompt), cached(stack, prompt)) == (0, 496)
    before = kv(stack, limit=16384)
    named = [
        d for d, state in zip(before["columns"]["depth"], before["columns"]["state"], strict=True) if state == "cached"
    ]
    assert len(named) == before["totals"]["cached_blocks"] >= 31
    assert sum(hits > 0 for hits in before["columns"]["hits"]) >= 31
    answer = httpx.post(f"{stack.url}/v1/cache/reset", timeout=20).raise_for_status().json()
    assert answer["blocks"] == len(named)
    after = kv(stack, limit=0)["totals"]
    assert (after["cached_blocks"], after["free_blocks"]) == (0, after["num_blocks"])
    assert (cached(stack, prompt), cached(stack, prompt)) == (0, 496)


def test_the_host_tier_is_seen(start_small: Callable[..., Stack]) -> None:
    """A device for one long prompt: what the next one pushes out is on the host, and comes back from there."""
    stack = start_small("--max-model-len", "600", "--num-gpu-blocks-override", "38", "--kv-offloading-size", "0.02")
    try:
        texts = [
            complete(stack, prompt=prompt, max_tokens=8, temperature=0)["choices"][0]["text"]
            for prompt in (PROMPT, PROMPT[::-1], PROMPT, PROMPT[::-1])
        ]
        assert texts[:2] == texts[2:]
        totals = kv(stack, limit=0)["totals"]
        assert totals["host_blocks"] > 100
        assert totals["host_cached_blocks"] >= 31
        page = kv(stack, tier="host", limit=16384)
        assert page["columns"]["state"].count("cached") == totals["host_cached_blocks"]
        assert sum(page["columns"]["hits"]) > 0, "something was restored"
        answer = httpx.post(f"{stack.url}/v1/cache/reset", timeout=20).raise_for_status().json()
        assert answer["blocks"] >= totals["host_cached_blocks"]
        assert kv(stack, limit=0)["totals"]["host_cached_blocks"] == 0
    finally:
        stack.stop()


# --- tenants ----------------------------------------------------------------------------------------------------------


def tenants(start_small: Callable[..., Stack], *flags: str) -> Stack:
    keys = ("--api-key", "alice,bob", "--admin-api-key", "root")
    return start_small(
        "--max-model-len", "1024", "--max-num-seqs", "8", "--enable-prompt-tokens-details", *keys, *flags
    )


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(9).integers(100, 40000, (count, 480)).tolist()


class Cache:
    """What the scheduler says of its prefix cache. Its metrics are seconds old while it works, so it waits for its lookups first."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.looked_up = self._total("queries")
        self.found = self._total("hits")

    def _total(self, what: str) -> float:
        return self.stack.metric(f"vllm:prefix_cache_{what}_total")

    def hits_since(self, tokens: int) -> float:
        """Tokens found since the last call, in which ``tokens`` were looked up."""
        self.looked_up += tokens
        self.stack.wait_for_metric("vllm:prefix_cache_queries_total", self.looked_up)
        before, self.found = self.found, self._total("hits")
        return self.found - before


@pytest.fixture(scope="module")
def by_tenant(start_small: Callable[..., Stack]) -> Iterator[Stack]:
    stack = tenants(start_small)
    yield stack
    stack.stop()


def test_one_tenant_cannot_time_another(by_tenant: Stack) -> None:
    """Pairs: a prompt that another tenant has sent just before, and one that nobody has.

    What the one who asks could measure is how much of it is computed: that is all of it in both halves of every pair, and
    next to nothing for the tenant that sent it first.
    """
    cache, pairs = Cache(by_tenant), prompts(8)
    for known, unknown in zip(pairs[::2], pairs[1::2], strict=True):
        assert cached(by_tenant, known, key="alice") == 0
        assert [cached(by_tenant, prompt, key="bob") for prompt in (known, unknown)] == [0, 0]
    assert cache.hits_since(4 * 3 * 480) == 0
    for known in pairs[::2]:
        assert [cached(by_tenant, known, key=key) for key in ("alice", "bob")] == [464, 464]
    assert cache.hits_since(4 * 2 * 480) == 4 * 2 * 464


def test_tenants_that_ask_at_the_same_time_share_nothing(by_tenant: Stack) -> None:
    """Their requests are the same, and no block is named by both."""
    prompt = np.random.default_rng(10).integers(100, 40000, 480).tolist()
    body = {"prompt": prompt, "n": 4, "temperature": 1, "max_tokens": 300, "seed": 1, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(complete, by_tenant, key=key, **body) for key in ("alice", "bob")]
        requests: set[str] = set()
        while len(requests) < 2:
            assert not any(one.done() for one in both), "they did not run beside each other"
            owners = [
                {owner.partition("/")[0] for owner in owners}
                for owners in kv(by_tenant, key="root")["columns"]["owners"]
            ]
            requests = set().union(*owners)
        assert max(map(len, owners)) == 1
        texts = [[choice["text"] for choice in one.result()["choices"]] for one in both]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None)])
def test_salts_keep_apart_what_one_tenant_sends(by_tenant: Stack, salts: tuple[str | None, str | None]) -> None:
    prompt = np.random.default_rng(11 + len(str(salts))).integers(100, 40000, 480).tolist()
    one, other = ({} if salt is None else {"cache_salt": salt} for salt in salts)
    found = [cached(by_tenant, prompt, key="alice", **salt) for salt in (one, other, one, other)]
    assert found == [0, 0, 464, 464]


def test_everyone_shares_if_the_operator_says_so(start_small: Callable[..., Stack]) -> None:
    stack = tenants(start_small, "--prefix-cache-scope", "global")
    (prompt,) = prompts(1)
    assert [cached(stack, prompt, key=key) for key in ("alice", "bob")] == [0, 464]
    assert cached(stack, prompt, key="bob", cache_salt="own") == 0
    stack.stop()


def test_nobody_shares_if_the_operator_says_so(start_small: Callable[..., Stack]) -> None:
    """Only the choices of one request do."""
    stack = tenants(start_small, "--prefix-cache-scope", "request")
    cache, (prompt,) = Cache(stack), prompts(1)
    assert [cached(stack, prompt, key=key) for key in ("alice", "alice", "bob")] == [0, 0, 0]
    assert cache.hits_since(3 * 480) == 0
    assert len({c["text"] for c in complete(stack, key="bob", prompt=prompt, n=3, max_tokens=8)["choices"]}) == 3
    stack.stop()
