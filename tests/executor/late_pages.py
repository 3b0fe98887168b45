"""A host tier whose moves come late, to find out who reads or overwrites pages too early."""

from __future__ import annotations

from torch import Tensor

from octavo_executor.host_pages import HostPages
from octavo_executor.kv_cache import KvCache
from octavo_kernels import Kernels


class LateHostPages(HostPages):
    """A copy engine that takes its time: nothing has moved until the last moment, when ``finish`` returns."""

    def __init__(self, cache: KvCache, kernels: Kernels, num_pages: int) -> None:
        super().__init__(cache, kernels, num_pages)
        self._late: list[tuple[bool, Tensor, Tensor]] = []

    def copy_out(self, source: Tensor, destination: Tensor) -> None:
        self._late.append((True, source, destination))

    def restore(self, source: Tensor, destination: Tensor) -> None:
        self._late.append((False, source, destination))

    def finish(self) -> float:
        late, self._late = self._late, []
        for out, source, destination in late:
            if out:
                super().copy_out(source, destination)
            else:
                super().restore(source, destination)
        return super().finish()
