"""The host tier: pages out, back, and serving as before, on a tiny real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from plan_maker import PlanMaker, Running, ints, make_runner, moves
from tiny_models import random_tokens, save_tiny_model
from torch import Tensor

from octavo_executor.batch import PlanError
from octavo_executor.runner import Runner
from octavo_executor.serve import load_model
from octavo_shared.plan import PageMoves
from octavo_shared.records import SamplingParams
from octavo_shared.settings import ExecutorSettings, SettingError, load_settings

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HOST_PAGES = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return save_tiny_model("llama", folder)


CASES = {
    "cpu": {},
    "cpu-bfloat16": {"dtype": "bfloat16"},
    "cpu-block-8": {"block_size": 8},
    "reference": {"backend": "reference"},
    "late": {"device": LateDevice("copy last")},
}


@pytest.fixture(params=CASES)
def maker(folder: Path, theirs: Any, request: pytest.FixtureRequest) -> PlanMaker:
    return PlanMaker(make_runner(folder, host_pages=HOST_PAGES, **CASES[request.param]))


def content(runner: Runner, page: int) -> list[Tensor]:
    return [runner._cache.k[:, page].clone(), runner._cache.v[:, page].clone()]


def host_content(runner: Runner, page: int) -> Tensor:
    return runner._moves._host._pages[page]


def mark(runner: Runner, pages: int) -> None:
    """Give the first pages and all host pages content that tells them apart, by layer, side and place."""
    cache, host = runner._cache, runner._moves._host._pages
    for tensor in (cache.k, cache.v, host):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    assert pages <= cache.num_blocks


def test_a_page_is_one_piece_on_the_host(maker: PlanMaker) -> None:
    mark(maker.runner, 10)
    before = [content(maker.runner, page) for page in range(10)]
    maker.step(copy_out=moves((3, 8), (9, 0)))
    for device, host in ((3, 8), (9, 0)):
        keys, values = before[device]
        assert torch.equal(host_content(maker.runner, host)[0].flatten(), keys.flatten())
        assert torch.equal(host_content(maker.runner, host)[1].flatten(), values.flatten())


def test_phases_are_in_order(maker: PlanMaker) -> None:
    """Out, then between device pages, then back in: each phase sees what the one before has done."""
    mark(maker.runner, 6)
    before = [content(maker.runner, page) for page in range(6)]
    old_host = host_content(maker.runner, 4).clone()
    maker.step(
        copy_out=moves((0, 1), (5, 2)),
        copies=moves((1, 0), (1, 2), (3, 5)),
        restores=moves((4, 1), (1, 3)),
    )
    now = [content(maker.runner, page) for page in range(6)]
    # Page 0 went to host page 1 and from there on to page 3; page 1's old content is in 0 and 2; 1 holds host page 4's.
    expected = {0: before[1], 2: before[1], 3: before[0], 4: before[4], 5: before[3]}
    for page, (keys, values) in expected.items():
        assert torch.equal(now[page][0], keys), page
        assert torch.equal(now[page][1], values), page
    assert torch.equal(now[1][0].flatten(), old_host[0].flatten())
    assert torch.equal(now[1][1].flatten(), old_host[1].flatten())
    assert torch.equal(host_content(maker.runner, 2)[0].flatten(), before[5][0].flatten())


def run_on_restored_pages(maker: PlanMaker, prompt: list[int], restored_before: bool) -> tuple[Running, Running]:
    """A sequence computes; its full pages go to the host, are overwritten, and come back elsewhere for its resumption.

    ``restored_before``: the restore is in an earlier plan than the row that computes on it, as the contract wants.
    """
    first = maker.admit(prompt, GREEDY)
    maker.step((first, len(prompt)))
    for _ in range(4):
        maker.step((first, 1))
    full = first.computed // maker.block
    out = moves(*((page, HOST_PAGES - 1 - i) for i, page in enumerate(first.table[:full])))
    maker.step(copy_out=out)
    maker.release(first)
    maker.runner._cache.k.fill_(float("nan"))
    maker.runner._cache.v.fill_(float("nan"))
    pages = [maker.free.pop(0) for _ in range(full)]
    back = moves(*((HOST_PAGES - 1 - i, page) for i, page in enumerate(pages)))
    if restored_before:
        timings = maker.step(restores=back).result.timings
        assert timings.restore_s > 0
    resumed = maker.admit(
        prompt + first.tokens,
        GREEDY,
        output_start=len(prompt),
        num_computed=full * maker.block,
        block_table=ints(*pages),
    )
    output = maker.step((resumed, resumed.known - resumed.computed), **({} if restored_before else {"restores": back}))
    assert (output.result.timings.restore_s > 0) != restored_before
    maker.finish(resumed)
    return first, resumed


def test_restored_pages_serve_like_their_originals(maker: PlanMaker, theirs: Any) -> None:
    prompt = random_tokens(45, 1)
    undisturbed = maker.admit(prompt, GREEDY)
    maker.finish(undisturbed)
    assert maker.runner._cache.k.dtype == torch.bfloat16 or undisturbed.tokens == greedy(theirs, prompt, 12)
    maker.release(undisturbed)
    maker.step()
    first, resumed = run_on_restored_pages(maker, prompt, restored_before=True)
    assert first.tokens + resumed.tokens == undisturbed.tokens


def test_a_restored_page_read_too_early_would_be_found_out(folder: Path, theirs: Any) -> None:
    """What the test above relies on: with a slow copy engine, a row in the restoring plan itself reads old content."""
    prompt = random_tokens(45, 1)
    in_time, late = (
        PlanMaker(make_runner(folder, host_pages=HOST_PAGES, device=device))
        for device in (None, LateDevice("copy last"))
    )
    first, resumed = run_on_restored_pages(in_time, prompt, restored_before=False)
    assert first.tokens + resumed.tokens == greedy(theirs, prompt, 12)
    _, broken = run_on_restored_pages(late, prompt, restored_before=False)
    assert broken.outputs[-1].problem is not None


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=count, max_new_tokens=count, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


BAD: dict[str, dict[str, PageMoves]] = {
    "copy_out: there is no host page 9; there are 9": {"copy_out": moves((1, 0), (1, 9))},
    "copy_out: there is no page 80": {"copy_out": moves((80, 0))},
    "copy_out: there is no page -1": {"copy_out": moves((-1, 0))},
    "copy_out: a host page is the destination twice": {"copy_out": moves((1, 3), (2, 3))},
    "restores: there is no host page -2": {"restores": moves((-2, 0))},
    "restores: there is no host page 9": {"restores": moves((9, 0))},
    "restores: there is no page 80": {"restores": moves((0, 80))},
    "restores: a page is the destination twice": {"restores": moves((0, 3), (1, 3))},
    "restores: 1 sources for 2 destinations": {"restores": replace(moves((0, 3), (1, 4)), source=ints(1))},
}


@pytest.fixture(scope="module")
def shared_runner(folder: Path, theirs: Any) -> Runner:
    return make_runner(folder, host_pages=HOST_PAGES)


@pytest.mark.parametrize("message", BAD)
def test_impossible_moves_are_refused_before_anything_moves(shared_runner: Runner, message: str) -> None:
    mark(shared_runner, 80)
    tensors = (shared_runner._cache.k, shared_runner._cache.v, shared_runner._moves._host._pages)
    before = [tensor.clone() for tensor in tensors]
    plan = PlanMaker(shared_runner).plan([], **({"copies": moves((4, 5))} | BAD[message]))
    with pytest.raises(PlanError, match=message):
        shared_runner.execute(plan)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def settings(folder: Path, **changes: Any) -> ExecutorSettings:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 8}
    return load_settings(ExecutorSettings, model=str(folder), num_threads=1, **(sizes | changes))


def test_the_size_is_given_in_gib(folder: Path, theirs: Any) -> None:
    page_bytes = load_model(settings(folder), "e").info.block_bytes
    assert load_model(settings(folder), "e").info.num_host_blocks == 0
    loaded = load_model(settings(folder, kv_offloading_size=10.5 * page_bytes / 2**30), "e")
    assert loaded.info.num_host_blocks == 10
    host = loaded.runner._moves._host
    assert (host.num_pages, host.nbytes) == (10, 10 * page_bytes)


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("0.000001", "--kv-offloading-size 1e-06 holds no block"),
        ("1e6", "--kv-offloading-size 1e.06: that is more than the .* free"),
        ("-1", "--kv-offloading-size .*greater than or equal to 0"),
        ("nan", "--kv-offloading-size .*finite"),
        ("inf", "--kv-offloading-size .*finite"),
        ("much", "--kv-offloading-size .*valid number"),
    ],
)
def test_impossible_sizes_fail_at_start_by_name(folder: Path, theirs: Any, size: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        load_model(settings(folder, kv_offloading_size=size), "e")


def test_both_pools_together_must_fit_the_machine(folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory for either but not for both."""
    import psutil

    page_bytes = load_model(settings(folder), "e").info.block_bytes
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=100 * page_bytes))
    gib = 60 * page_bytes / 2**30
    assert load_model(settings(folder, kv_offloading_size=gib), "e").info.num_host_blocks == 60
    with pytest.raises(SettingError, match=r"--kv-offloading-size: a host tier of .* beside a KV cache"):
        load_model(settings(folder, kv_offloading_size=gib, num_gpu_blocks_override=50), "e")
