"""Steps under way on a device that does its work late, against the same plans one by one on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen_kernels import FrozenKernels
from late_device import WAITS, LateDevice
from pipelined_traffic import HOST_PAGES, Traffic
from plan_maker import make_kernels, make_runner, spoil
from tiny_models import save_tiny_model

from octavo_executor.runner import Runner
from octavo_shared.plan import StepOutput, StepPlan

ORDERS: list[str | int] = ["copy last", "copy first", "compute first", 1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Runner:
    return make_runner(folder, host_pages=HOST_PAGES)


def late_runner(folder: Path, device: LateDevice, frozen: FrozenKernels | None = None) -> Runner:
    sizes = () if frozen is None else (1, 2, 4)
    return make_runner(folder, host_pages=HOST_PAGES, device=device, kernels=frozen, graph_sizes=sizes)


def one_by_one(plain: Runner, plans: list[StepPlan]) -> list[StepOutput]:
    plain.reset()
    spoil(plain._cache)
    return [plain.execute(plan) for plan in plans]


def same(got: list[StepOutput], expected: list[StepOutput]) -> bool:
    return all(
        mine.rows == theirs.rows
        and mine.result.tokens.tolist() == theirs.result.tokens.tolist()
        and mine.result.sample_counts.tolist() == theirs.result.sample_counts.tolist()
        and mine.result.ends.tolist() == theirs.result.ends.tolist()
        for mine, theirs in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_under_way_changes_nothing(folder: Path, plain: Runner, order: str | int, graphs: bool) -> None:
    frozen = FrozenKernels(make_kernels("cpu", 16, 16)) if graphs else None
    device = LateDevice(order, capture=frozen and frozen.capture)
    for seed in range(3):
        traffic = Traffic(late_runner(folder, device, frozen), seed)
        got = traffic.run()
        assert same(got, one_by_one(plain, traffic.plans))
    assert sum(len(plan.copy_out) and len(plan.row_slots) for plan in traffic.plans) > 0
    assert frozen is None or frozen.replayed > 10


@pytest.mark.parametrize("wait", WAITS, ids="-for-".join)
def test_no_wait_can_be_left_out(folder: Path, plain: Runner, wait: tuple[str, str]) -> None:
    """What the test above relies on: each wait is missed in some order."""
    for order in ORDERS:
        for seed in range(4):
            traffic = Traffic(late_runner(folder, LateDevice(order, ignored=(wait,))), seed)
            try:
                got = traffic.run()
            except Exception:
                return
            if not same(got, one_by_one(plain, traffic.plans)):
                return
    raise AssertionError(f"nobody misses that {wait[0]} waits for {wait[1]}")
