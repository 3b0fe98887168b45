"""Greedy outputs do not depend on where pages live: no host tier, a tiny one, a large one, under constant preemption."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process_stack import Choices, Model, Stack, make_request

from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from tiny_models import save_tiny_model

VOCAB = 131
BLOCK = 8
OUTPUTS = 40
REQUESTS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True, logprobs=0)
# By name: how many pages the host has, beside a device that has a tenth of what all requests hold at their ends.
TIERS = {"off": 0, "tiny": 5, "large": 400}


def records() -> list[RequestRecord]:
    """Prompts of 10 to 79 tokens of two tenants; every third begins like another one, and some fork or search."""
    rng = np.random.default_rng(17)
    shared = rng.integers(3, VOCAB, 40)
    found = []
    for i in range(REQUESTS):
        prompt = rng.integers(3, VOCAB, 10 + 3 * i)
        if i % 3 == 0 and len(prompt) > 40:
            prompt[:40] = shared
        sampling, n = GREEDY, 1
        if i % 8 == 3:
            sampling, n = replace(GREEDY, temperature=1.0, seed=i), 3
        elif i % 8 == 6:
            sampling, n = replace(GREEDY, beam_width=3, logprobs=None, max_tokens=12), 3
        found.append(make_request(i, prompt, sampling, n=n, tenant=f"t{i % 2}", priority=i % 5))
    return found


def demand() -> int:
    """Blocks that all requests hold at their ends."""
    return sum(-(-(len(record.prompt) + record.sampling.max_tokens) // BLOCK) for record in records())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", made)
    return made


def load(folder: Path, blocks: int, host_blocks: int) -> Model:
    sizes = {"block_size": BLOCK, "max_model_len": 128, "max_num_seqs": REQUESTS, "dtype": "float32"}
    page_bytes = 2 * 3 * 2 * 16 * BLOCK * 4  # keys and values, layers, heads, head_dim, tokens, float32
    offloading = host_blocks * page_bytes / 2**30
    model = Model.load(folder, num_gpu_blocks_override=blocks, kv_offloading_size=offloading, **sizes)
    assert (model.info.block_bytes, model.info.num_host_blocks) == (page_bytes, host_blocks)
    return model


@pytest.fixture(scope="module")
def expected(folder: Path) -> Choices:
    return dict(load(folder, 600, 0).stack(enable_prefix_caching=False).run(records()))


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
@pytest.mark.parametrize("tier", TIERS)
def test_tiny_model(folder: Path, expected: Choices, tier: str, policy: str) -> None:
    blocks = demand() // 10
    stack = load(folder, blocks, TIERS[tier]).stack(free_moves=True, rash=True, scheduling_policy=policy)
    # The second time round much is known, some of it only on the host.
    for again in range(2):
        check(stack, expected, records(), 1000 * again)
    assert stack.core.stats.preemptions > REQUESTS
    restored, saved = stack.watch.restored, stack.watch.saved
    if tier == "off":
        assert restored == saved == 0
    else:
        assert min(saved, restored) > 20
    if tier == "tiny":
        assert saved > TIERS["tiny"], "its pages are used again and again"


def check(stack: Stack, expected: Choices, everyone: list[RequestRecord], offset: int) -> None:
    """Run them all at once under other numbers."""
    choices = stack.run([replace(record, id=RequestId("test", offset + record.id.serial)) for record in everyone])
    for record in everyone:
        for choice in range(record.n):
            wanted, got = expected[record.id.serial, choice], choices[offset + record.id.serial, choice]
            assert (got.tokens, got.end) == (wanted.tokens, wanted.end), f"prompt of {len(record.prompt)} tokens"
            logprobs = ([entry.logprob for entry in one.logprobs] for one in (got, wanted))
            np.testing.assert_allclose(*logprobs, rtol=0, atol=1e-4)


def test_default_model(model_folder: Path) -> None:
    """Here it is the measured costs that decide: a page is back much sooner than its tokens are computed."""
    rng = np.random.default_rng(2)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    everyone = [make_request(i, rng.integers(100, 40000, 20 + 30 * i), greedy) for i in range(8)]
    blocks = sum(-(-(len(record.prompt) + 12) // 16) for record in everyone)
    page_bytes = 2 * 30 * 3 * 64 * 16 * 4  # keys and values, layers, heads, head_dim, tokens, float32

    def stack(device: int, host: int) -> Stack:
        sizes = {"num_gpu_blocks_override": device, "kv_offloading_size": host * page_bytes / 2**30}
        model = Model.load(model_folder, max_model_len=256, max_num_seqs=12, dtype="float32", **sizes)
        assert model.info.num_host_blocks == host
        return model.stack(rash=True)

    expected = dict(stack(2 * blocks, 0).run(everyone))
    # The longest of them alone needs 16 blocks; a tenth of the demand would be 7.
    tight = stack(16, blocks)
    check(tight, expected, everyone, 1000)
    check(tight, expected, everyone, 2000)
    assert tight.core.stats.preemptions > 0
    assert tight.watch.restored > blocks // 2
    costs = tight.core.costs
    assert 0 < costs.restore_s_per_block < 16 * costs.prefill_s_per_token
