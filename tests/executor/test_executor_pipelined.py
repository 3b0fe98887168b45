"""Steps under way on a device that does its work late, against the same plans one by one on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_kernels import FrozenKernels
from late_device import WAITS, LateDevice
from pipelined_traffic import HOST_PAGES, Traffic
from plan_maker import make_kernels, make_runner, spoil
from tiny_models import save_tiny_model
from torch.overrides import TorchFunctionMode

from octavo_executor.device import Work
from octavo_executor.runner import Runner
from octavo_executor.step_work import Launched
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


@pytest.fixture(scope="module")
def careful(folder: Path) -> Runner:
    """Kernels that refuse to touch what is not there: what goes wrong on purpose must not end the process."""
    return make_runner(folder, "reference", host_pages=HOST_PAGES)


def late_runner(folder: Path, device: LateDevice, frozen: FrozenKernels | None = None, backend: str = "cpu") -> Runner:
    sizes = () if frozen is None else (1, 2, 4)
    return make_runner(folder, backend, host_pages=HOST_PAGES, device=device, kernels=frozen, graph_sizes=sizes)


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


@pytest.mark.parametrize(("order", "graphs"), [(order, i % 2 == 1) for i, order in enumerate(ORDERS)])
def test_what_is_under_way_changes_nothing(folder: Path, plain: Runner, order: str | int, graphs: bool) -> None:
    frozen = FrozenKernels(make_kernels("cpu", 16, 16)) if graphs else None
    device = LateDevice(order, capture=frozen and frozen.capture)
    plans: list[StepPlan] = []
    for seed in range(2):
        traffic = Traffic(late_runner(folder, device, frozen), seed)
        got = traffic.run()
        assert same(got, one_by_one(plain, traffic.plans))
        plans += traffic.plans
    # Everything that has an order occurred.
    for kind in ("copy_out", "copies", "restores"):
        assert sum(len(getattr(plan, kind)) > 0 and len(plan.row_slots) > 0 for plan in plans) > 3
    assert sum(len(plan.sample_slots) > (plan.row_samples > 0).sum() for plan in plans) > 3
    assert frozen is None or frozen.replayed > 10


@pytest.mark.parametrize("wait", WAITS, ids="-for-".join)
def test_no_wait_can_be_left_out(folder: Path, careful: Runner, wait: tuple[str, str]) -> None:
    """What the test above relies on: each wait is missed in some order."""
    assert is_missed(
        careful, lambda order: late_runner(folder, LateDevice(order, ignored=(wait,)), backend="reference")
    )


def is_missed(plain: Runner, make: Callable[[str | int], Runner]) -> bool:
    """Whether steps under way on such a runner come to something else in some order."""
    for order in ORDERS:
        for seed in range(2):
            traffic = Traffic(make(order), seed)
            try:
                got = traffic.run()
            except (ValueError, IndexError, RuntimeError):
                return True  # what was read was not even a status, a slot, a length
            if not same(got, one_by_one(plain, traffic.plans)):
                return True
    return False


@pytest.mark.parametrize("kind", ["uploads", "results"])
def test_memory_of_a_step_is_its_own(folder: Path, careful: Runner, kind: str) -> None:
    """Two steps under way that share what goes up, or what comes down, would spoil each other's."""

    def sharing(order: str | int) -> Runner:
        runner = late_runner(folder, LateDevice(order), backend="reference")
        first, second = runner._lanes
        setattr(second, kind, getattr(first, kind))
        second.header = first.header
        return runner

    assert is_missed(careful, sharing)


class NobodyLooks(TorchFunctionMode):
    """Whatever would make the host wait for the device fails, except within kernels, whose CPU versions may."""

    NAMES = frozenset(
        {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "allclose", "is_nonzero"}
        | {"__bool__", "__int__", "__float__", "__index__"}
    )

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device
        self.in_kernel = 0
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_kernel:
            self.seen += 1
            name = getattr(func, "__name__", "")
            if name in self.NAMES:
                assert args[0].untyped_storage().data_ptr() in self._device.pinned_at, f"{name} of a device's tensor"
            if name == "__getitem__":
                masks = [
                    x for x in (args[1] if isinstance(args[1], tuple) else (args[1],)) if isinstance(x, torch.Tensor)
                ]
                assert not any(mask.dtype == torch.bool for mask in masks), (
                    "how many a mask selects only the device knows"
                )
        return func(*args, **(kwargs or {}))


class KernelsApart(FrozenKernels):
    """Kernels in which the host may look at anything."""

    guard: NobodyLooks | None = None

    def capture(self, work: Work) -> Work:
        replay = super().capture(work)
        return lambda: self._apart(replay)

    def _apart(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.guard is None:
            return call(*args, **options)
        self.guard.in_kernel += 1
        try:
            return call(*args, **options)
        finally:
            self.guard.in_kernel -= 1

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not callable(value):
            return value

        return lambda *args, **options: self._apart(value, *args, **options)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_launch_waits_for_nothing(folder: Path, plain: Runner, graphs: bool) -> None:
    """Between the sampling of a step and the launch of the next the host asks the device nothing: it has not even begun."""
    kernels = KernelsApart(make_kernels("cpu", 16, 16))
    device = LateDevice("copy last", capture=kernels.capture)
    runner = make_runner(
        folder, host_pages=HOST_PAGES, device=device, kernels=kernels, graph_sizes=(1, 4) if graphs else ()
    )
    guard = kernels.guard = NobodyLooks(device)
    device.around = lambda: guard
    launch = runner.launch

    def guarded(plan: StepPlan) -> Launched:
        before = device.ran
        with guard:
            launched = launch(plan)
        assert device.ran == before
        assert launched.lane.done is not None
        assert not launched.lane.done.query()
        return launched

    runner.launch = guarded  # type: ignore[method-assign]
    traffic = Traffic(runner, 5)
    assert same(traffic.run(), one_by_one(plain, traffic.plans))
    assert guard.seen > 1000
    with guard, pytest.raises(AssertionError, match="item of a device's tensor"):
        runner._tables.tokens[0, 0].item()
