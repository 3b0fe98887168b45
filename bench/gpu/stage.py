"""What every section works with: the device or what stands for it, comparisons, times and the CSV file.

Three modes. "gpu" is the real thing. "tiny" runs the same code on CPU tensors by Triton's interpreter, with small sizes.
"compile" takes tensors without memory (torch's meta device) in the real sizes: every launch is compiled for a GPU that is not
there, exactly as it would be launched, and nothing is compared or timed.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from octavo_kernels.triton import backend
from octavo_kernels.triton.attention_config import Gpu
from octavo_kernels.triton.backend import TritonKernels

Mode = Literal["gpu", "tiny", "compile"]
T = TypeVar("T")

# More than the L2 cache of any GPU (an H200 has 50 MB); reading it takes long enough for the host to get ahead.
FLUSH_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: ``error`` is what was measured, ``limit`` the most it may be."""

    check: str
    case: str
    error: float
    limit: float
    passed: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float


def _without_scaled_products() -> torch.library.Library:
    """As long as this lives, tensors without memory may be multiplied in e4m3 into another one, for which torch lacks the word."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_scaled_mm.out", lambda *factors, out, **options: out)
    return library


class Stage:
    """The device of a section. Not thread-safe."""

    def __init__(self, mode: Mode, gpu: Gpu | None = None) -> None:
        """``gpu`` is what "compile" compiles for."""
        self.mode = mode
        self.device = torch.device({"gpu": "cuda:0", "tiny": "cpu", "compile": "meta"}[mode])
        if gpu is not None:
            backend.describe_gpu = lambda device: gpu
        elif mode == "compile":
            raise ValueError("nothing says what to compile for")
        self.gpu = backend.describe_gpu(self.device)
        self._flush: Tensor | None = None
        self._library = _without_scaled_products() if mode == "compile" else None
        torch.manual_seed(0)

    @property
    def tiny(self) -> bool:
        """Whether sizes must be small."""
        return self.mode == "tiny"

    def pick(self, real: T, tiny: T) -> T:
        """A size by mode."""
        return tiny if self.tiny else real

    def kernels(self, max_tokens: int = 8192, max_seqs: int = 1024) -> TritonKernels:
        """The kernels on this device."""
        return TritonKernels(self.device, max_tokens=max_tokens, max_seqs=max_seqs)

    def put(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Values of the host (numbers, numpy, tensor) on the device."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device).to(dtype)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can reach."""
        if self.mode == "compile":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty(shape, dtype=dtype, pin_memory=self.mode == "gpu")

    def wait(self) -> None:
        """Until the device has done everything. Raises RuntimeError: something went wrong there."""
        if self.mode == "gpu":
            torch.cuda.synchronize()

    def replay(self, work: Callable[[], object]) -> Callable[[], object]:
        """``work``, run twice and then captured as a graph; what it returns runs it again. Without graphs, ``work``."""
        if self.mode != "gpu":
            work()
            return work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def warm_up(self) -> None:
        """Bring the clocks up."""
        if self.mode != "gpu":
            return
        matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.5:
            for _ in range(10):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object], repeats: int = 20, *, cold: bool = True, graph: bool = True) -> Timing:
        """How long the device takes for ``work``; with ``cold`` its L2 cache holds other things each time.

        As a graph, so that launching it costs nothing; the flush before it lets the host get ahead, so that the first event
        is recorded when the device is ready to go on.
        """
        if self.mode == "compile":
            work()
            return Timing(math.nan, math.nan, math.nan)
        if self.mode == "tiny":
            work()
            return _spread([_host_seconds(work) for _ in range(2)])
        run = self.replay(work) if graph else work
        if self._flush is None:
            self._flush = torch.ones(FLUSH_BYTES // 4, device=self.device)
        total = torch.empty((), device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 2)]
        for before, after in events:
            if cold:
                torch.sum(self._flush, 0, out=total)  # reading, not writing: nothing is left to be written back
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return _spread([before.elapsed_time(after) / 1e3 for before, after in events[2:]])

    def close(
        self, check: str, case: str, got: Tensor, want: Callable[[], Tensor], limit: float, width: int
    ) -> Finding:
        """Compare rows of ``width`` numbers: the largest distance of a row from what is wanted, in lengths of the latter."""
        if self.mode == "compile":
            return Finding(check, case, 0.0, limit, True, "compiled")
        self.wait()
        # The interpreter cuts bfloat16 off instead of rounding it.
        limit = limit * 4 if self.tiny else limit
        expected = want().double().reshape(-1, width)
        if not bool(expected.isfinite().all()):
            raise ValueError(f"{check}, {case}: the reference is not finite")
        if not expected.numel():
            return Finding(check, case, 0.0, limit, True)
        distance = (got.double().reshape(-1, width) - expected).norm(dim=1)
        length = expected.norm(dim=1)
        length = length.clamp(min=float(length.mean()) * 1e-3 + 1e-30)
        error = float((distance / length).max())
        return Finding(check, case, error, limit, error <= limit)

    def equal(
        self, check: str, case: str, got: Tensor, want: Callable[[], Tensor], *, computed: bool = False
    ) -> Finding:
        """Compare bit by bit; the error is the share of bytes that differ.

        What was ``computed`` is only to be close under the interpreter: its products round a row otherwise at another place of
        the matrix, and it cuts bfloat16 off.
        """
        if self.mode == "compile":
            return Finding(check, case, 0.0, 0.0, True, "compiled")
        if self.tiny and computed:
            return self.close(check, case, got, want, 5e-3, got.shape[-1])
        self.wait()
        differ = (_bytes(got) != _bytes(want())).float().mean()
        share = float(differ) if got.numel() else 0.0
        return Finding(check, case, share, 0.0, share == 0.0)

    def measured(self, check: str, case: str, error: Callable[[], float], limit: float, note: str = "") -> Finding:
        """An error worked out by ``error``, which may look at results."""
        if self.mode == "compile":
            return Finding(check, case, 0.0, limit, True, "compiled")
        self.wait()
        value = error()
        return Finding(check, case, value, limit, value <= limit, note)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _host_seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _spread(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


class Table:
    """A CSV file that is complete after every row, whatever happens next."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, list(columns))
        self._writer.writeheader()
        self._file.flush()

    def add(self, **row: object) -> None:
        """One row, to the terminal as well."""
        shown = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()}
        self._writer.writerow(shown)
        self._file.flush()
        print("  ".join(f"{k} {v}" for k, v in shown.items() if v != ""), flush=True)


def run_timings(stage: Stage, table: Table, cases: Iterable[T], measure: Callable[[T], dict[str, object]]) -> int:
    """One row per case; 1 if one cannot be measured. A device in error ends the section."""
    failed = 0
    for case in cases:
        try:
            table.add(**measure(case))
        except Exception as error:
            failed = 1
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            stage.wait()
            if stage.mode == "gpu":
                torch.cuda.empty_cache()
    return failed


FINDING_COLUMNS = [field.name for field in fields(Finding)]


def run_checks(stage: Stage, path: Path, checks: Iterable[tuple[str, Callable[[Stage], Iterable[Finding]]]]) -> int:
    """Run checks one after the other, each on its own; 1 if one failed. A device in error ends the section."""
    table = Table(path, FINDING_COLUMNS)
    failed = 0
    for name, check in checks:
        try:
            for finding in check(stage):
                table.add(**asdict(finding))
                failed += not finding.passed
        except Exception as error:
            failed += 1
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            table.add(**asdict(Finding(name, "", math.inf, 0.0, False, note)))
            stage.wait()  # an error of the device comes again here, and nothing after it means anything
    return 1 if failed else 0
