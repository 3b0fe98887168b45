"""What computes: its memory, and the streams on which work is enqueued. Nothing else here knows CUDA by name.

Work is handed to a stream as a closure. On a GPU ``submit`` runs the closure at once and what it enqueues happens later; a
closure must therefore take whatever it needs of the host's memory with it, and may neither look at what tensors of the
device hold nor leave tensors behind for other streams, unless their memory outlives the work. Work of one stream happens in
order; work of two streams in any order that ``wait`` does not forbid.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], None]
# Pinned memory of this size and more is pinned in place: torch's allocator rounds sizes up to powers of two.
LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the whole device: what nobody holds, and what there is."""

    free_bytes: int
    total_bytes: int


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until all work before it has happened."""

    def query(self) -> bool:
        """Whether it has."""

    def seconds_since(self, earlier: Event) -> float:
        """Time between two events that were recorded with ``timed`` and have happened."""


class Stream(Protocol):
    """Work in order."""

    def submit(self, work: Work) -> None:
        """Enqueue what ``work`` does."""

    def record(self, *, timed: bool = False) -> Event:
        """The point after all work enqueued so far."""

    def wait(self, event: Event) -> None:
        """Work enqueued from now on happens after ``event``. The caller does not wait."""


class Device(Protocol):
    """Owns the streams. ``compute`` carries steps, ``copy`` moves pages to and from the host, ``fetch`` brings results.

    ``host_memory``: tensors of the device are the host's own, and work is done when ``submit`` returns. Otherwise both have
    memory of their own, and ``depth`` steps may be under way at once.
    """

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""

    @property
    def host_memory(self) -> bool:
        """Whether the host can look into its tensors at any time."""

    @property
    def depth(self) -> int:
        """Steps under way at once."""

    @property
    def compute(self) -> Stream:
        """Carries steps."""

    @property
    def copy(self) -> Stream:
        """Moves pages between the tiers."""

    @property
    def fetch(self) -> Stream:
        """Brings results to the host."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the device."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device, zeros before anything else happens on it."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host that the device reads and writes by itself. It lives as long as the device.

        Raises:
            MemoryError: the system does not pin so much.
        """

    def synchronize(self) -> None:
        """Wait for all work of all streams."""

    def capture(self, work: Work) -> Work | None:
        """What does the same as ``work``, with the same arguments, whenever it is submitted to ``compute``; None: not supported.

        ``work`` runs once before: whatever it makes when it first runs must then be there. It may use nothing but
        tensors that live as long as what is returned.
        """

    def memory(self) -> DeviceMemory:
        """How it stands, memory that is only cached by this process counted as free."""

    def reset_peak(self) -> None:
        """Begin to measure ``peak_bytes`` anew."""

    def allocated_bytes(self) -> int:
        """Bytes of this process's tensors now."""

    def peak_bytes(self) -> int:
        """The most bytes of this process's tensors at once since ``reset_peak``."""


class _Moment:
    """An event of a CPU: it has happened when it is there."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Moment)
        return self.at_s - earlier.at_s


class _AtOnce:
    """A stream whose work is done when ``submit`` returns."""

    def submit(self, work: Work) -> None:
        work()

    def record(self, *, timed: bool = False) -> Event:
        return _Moment()

    def wait(self, event: Event) -> None:
        pass


class CpuDevice:
    """The machine's own processors; implements ``Device``."""

    torch_device = torch.device("cpu")
    host_memory = True
    depth = 1

    def __init__(self) -> None:
        self.compute = self.copy = self.fetch = _AtOnce()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        pass

    def capture(self, work: Work) -> Work | None:
        return None

    def memory(self) -> DeviceMemory:
        import psutil  # a GPU's host may lack it

        memory = psutil.virtual_memory()
        return DeviceMemory(memory.available, memory.total)

    def reset_peak(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        # Lets other threads of this process run.
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def submit(self, work: Work) -> None:
        # Torch's operators and Triton's launches go to the current stream, and so do allocations: memory that ``work`` frees
        # is handed out again to later work of the same stream alone.
        with torch.cuda.stream(self.stream):
            work()

    def record(self, *, timed: bool = False) -> Event:
        return _CudaEvent(self.stream, timed)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


class _PinnedMemory(mmap.mmap):
    """Memory of the host in system pages of its own: a page that two registrations share is refused."""

    _runtime: Any = None
    _address = 0

    def pin(self, runtime: Any) -> Tensor:
        """Its bytes, uint8[size], for the device to read and write until this and all tensors of it are gone.

        Raises:
            MemoryError: the system does not pin so much.
        """
        # Compilers are started as processes: a page that one of them shares for a moment could be copied under the device.
        self.madvise(mmap.MADV_DONTFORK)
        tensor = torch.frombuffer(self, dtype=torch.uint8)
        # 1 is cudaHostRegisterPortable.
        error = int(runtime.cudaHostRegister(tensor.data_ptr(), len(self), 1))
        if error:
            raise MemoryError(f"{len(self) / 2**30:.2f} GiB of memory cannot be pinned: CUDA's error {error}")
        self._runtime, self._address = runtime, tensor.data_ptr()
        return tensor

    def __del__(self) -> None:
        # Before the pages go: another mapping may get their addresses, and would be taken for registered.
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self._address)


class CudaDevice:
    """One GPU; implements ``Device``. It is the current device of the thread that makes it, which must be the one that uses it."""

    host_memory = False
    depth = 2

    def __init__(self, index: int = 0) -> None:
        """Raises ValueError: there is no such GPU."""
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ValueError(f"there is no GPU {index}: torch {torch.__version__} finds {count}")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.compute = _CudaStream(self.torch_device)
        self.copy = _CudaStream(self.torch_device)
        self.fetch = _CudaStream(self.torch_device)
        # Graphs are replayed one at a time and leave nothing in their memory: one piece serves all.
        self._pool = torch.cuda.graph_pool_handle()
        self._pinned: list[_PinnedMemory] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        # They are written on the stream that is current now, and streams made above do not wait for that one.
        torch.cuda.current_stream(self.torch_device).synchronize()
        return tensor

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size < LARGE_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        memory = _PinnedMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        words = memory.pin(torch.cuda.cudart())
        self._pinned.append(memory)
        return words.view(dtype).view(shape)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def capture(self, work: Work) -> Work | None:
        # On the stream that it is captured on and replayed on: cuBLAS has a workspace for each stream, made at first use.
        self.compute.submit(work)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may do what this one must not while it captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.compute.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        return DeviceMemory(*torch.cuda.mem_get_info(self.torch_device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))
