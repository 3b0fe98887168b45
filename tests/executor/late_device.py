"""A device whose work comes late, in any order that nobody has forbidden: what is missing of an order gives wrong results.

Its tensors are a CPU's, but they are not the host's: what is submitted waits in the queue of its stream until somebody waits
for it, and then the streams take turns as an order of the test's choosing has it. A copy that is not waited for, pinned memory
written over too early, a page used while a step under way still needs it: all of it happens, as on a real device it might.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo_executor.device import DeviceMemory, Event, Work

# (who waits, whose work): every wait there is.
WAITS = [("copy", "compute"), ("compute", "copy"), ("fetch", "compute"), ("host", "fetch"), ("host", "copy")]


class LateEvent:
    def __init__(self, device: LateDevice, stream: str) -> None:
        self._device, self.stream = device, stream
        self.happened, self.at_s = False, 0.0

    def synchronize(self) -> None:
        if ("host", self.stream) not in self._device.ignored:
            self._device.run_until(lambda: self.happened)

    def query(self) -> bool:
        if not self.happened:
            self._device.run_some()
        return self.happened

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, LateEvent)
        assert (self.happened and earlier.happened) or self._device.ignored
        return self.at_s - earlier.at_s

    def happen(self) -> None:
        self.happened, self.at_s = True, time.perf_counter()


class LateStream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self._device, self.name = device, name
        self.queue: deque[Work | LateEvent] = deque()

    def submit(self, work: Work) -> None:
        self.queue.append(work)

    def record(self, *, timed: bool = False) -> Event:
        event = LateEvent(self._device, self.name)
        self.queue.append(event.happen)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if (self.name, event.stream) not in self._device.ignored:
            self.queue.append(event)

    @property
    def runnable(self) -> bool:
        return bool(self.queue) and not (isinstance(self.queue[0], LateEvent) and not self.queue[0].happened)

    def run_one(self) -> None:
        first = self.queue.popleft()
        self._device.ran += 1
        if not isinstance(first, LateEvent):
            with torch.inference_mode(), self._device.around():
                first()


class LateDevice:
    """``order``: "copy last", "copy first", "compute first", or the seed of a random one. ``ignored`` waits are left out."""

    torch_device = torch.device("cpu")
    host_memory = False
    depth = 2

    def __init__(
        self,
        order: str | int,
        *,
        ignored: tuple[tuple[str, str], ...] = (),
        capture: Callable[[Work], Work] | None = None,
    ) -> None:
        self.ignored = set(ignored)
        self.compute, self.copy, self.fetch = (LateStream(self, name) for name in ("compute", "copy", "fetch"))
        # Storages of pinned memory, which alone the host may look into while work is under way.
        self.pinned_at: set[int] = set()
        self.ran = 0
        # What work is carried out within, and what capturing does: for tests.
        self.around: Callable[[], Any] = torch.inference_mode
        self._capture = capture
        self._random = random.Random(order)
        self._ranks = {
            "copy last": ["fetch", "compute", "copy"],
            "copy first": ["copy", "compute", "fetch"],
            "compute first": ["compute", "copy", "fetch"],
        }.get(str(order))

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.run_some(), "everything waits for something that never comes"

    def run_some(self) -> bool:
        """Let time pass: one piece of work is done, if there is any."""
        able = [stream for stream in (self.compute, self.copy, self.fetch) if stream.runnable]
        if able and self._ranks is None:
            self._random.choice(able).run_one()
        elif able:
            min(able, key=lambda stream: self._ranks.index(stream.name)).run_one()  # type: ignore[union-attr]
        return bool(able)

    def synchronize(self) -> None:
        self.run_until(lambda: not (self.compute.queue or self.copy.queue or self.fetch.queue))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype)
        self.pinned_at.add(tensor.untyped_storage().data_ptr())
        return tensor

    def capture(self, work: Work) -> Work | None:
        return None if self._capture is None else self._capture(work)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 30, 1 << 30)

    def reset_peak(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0
