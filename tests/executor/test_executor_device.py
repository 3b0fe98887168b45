"""Devices, as far as a machine without a GPU has them; ordering is proven in test_executor_pipelined.py."""

from __future__ import annotations

import pytest
import torch

from octavo_executor.device import CpuDevice, CudaDevice


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no GPU 0: torch .* finds 0"):
        CudaDevice()
