"""Devices, as far as a machine without a GPU has them; ordering is proven in test_executor_pipelined.py."""

from __future__ import annotations

import ctypes
import gc
import mmap

import pytest
import torch

from octavo_executor.device import CpuDevice, CudaDevice, _PinnedMemory


def test_a_cpu_does_its_work_at_once() -> None:
    device, done = CpuDevice(), []
    begun = device.compute.record(timed=True)
    device.compute.submit(lambda: done.append(sum(range(1000))))
    ended = device.compute.record(timed=True)
    assert done == [499500]
    assert ended.query()
    assert ended.seconds_since(begun) > 0
    assert device.zeros((2, 3), torch.int32).tolist() == [[0] * 3] * 2
    memory = device.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


class Runtime:
    """What CUDA is told."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.last_bytes: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        # Still mapped.
        self.last_bytes.append(ctypes.c_ubyte.from_address(address + self.registered.pop(address) - 1).value)
        return 0


def pinned(size: int, runtime: Runtime) -> torch.Tensor:
    return _PinnedMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).pin(runtime)


def test_pinned_memory_is_given_back_with_its_last_tensor() -> None:
    runtime, size = Runtime(), 3 * mmap.PAGESIZE
    tensor = pinned(size, runtime)
    assert runtime.registered == {tensor.data_ptr(): size}
    part = tensor.view(torch.int32)[-1:]
    del tensor
    part.fill_(0x07000000)
    gc.collect()
    assert runtime.registered
    del part
    gc.collect()
    assert runtime.registered == {}
    assert runtime.last_bytes == [7]


def test_memory_that_cannot_be_pinned_was_never_registered() -> None:
    runtime = Runtime(error=2)
    with pytest.raises(MemoryError, match="CUDA's error 2"):
        pinned(mmap.PAGESIZE, runtime)
    gc.collect()
    assert runtime.last_bytes == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no GPU 0: torch .* finds 0"):
        CudaDevice()
