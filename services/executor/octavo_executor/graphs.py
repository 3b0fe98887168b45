"""Steps of decodes alone, captured once per number of rows and replayed.

A decode of a small batch is hundreds of launches of a few microseconds each, which the host cannot issue as fast as the device
carries them out. Replayed, they are one.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable

from octavo_executor.device import Device, Work
from octavo_shared.errors import SettingError

logger = logging.getLogger(__name__)

DEFAULT_LARGEST = 512


def graph_sizes(max_num_seqs: int, largest: int | None = None, given: Iterable[int] = ()) -> tuple[int, ...]:
    """Numbers of rows to capture: those ``given`` (``--cuda-graph-sizes``), or 1, 2, 4, then in eights up to 256, then in
    sixteens, up to ``largest`` (``--max-cudagraph-capture-size``); none above ``max_num_seqs``, the last one at it.

    Raises:
        SettingError: a size is less than 1.
    """
    sizes = sorted(set(given))
    if sizes and sizes[0] < 1:
        raise SettingError(f"--cuda-graph-sizes {sizes[0]}: a graph has at least one row")
    if largest is not None and largest < 1:
        raise SettingError(f"--max-cudagraph-capture-size {largest}: a graph has at least one row")
    if sizes:
        return tuple(size for size in sizes if size <= max_num_seqs)
    top = min(max_num_seqs, largest or DEFAULT_LARGEST)
    usual = [1, 2, 4, *range(8, 257, 8), *range(272, top + 1, 16)]
    return tuple(sorted({*(size for size in usual if size <= top), top}))


class DecodeGraphs:
    """Owns what was captured, by number of rows. A step of n rows replays the smallest graph that has room for it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._replays: list[Work] = []

    def capture(
        self,
        sizes: Iterable[int],
        step: Callable[[int], Work],
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Capture ``step(size)`` for each of ``sizes``; ``progress`` is told the fraction done.

        The largest first: the others then find room in what it has left of its memory.
        """
        found: list[tuple[int, Work]] = []
        ordered = sorted(set(sizes), reverse=True)
        for done, size in enumerate(ordered, 1):
            replay = self._device.capture(step(size))
            if replay is None:
                logger.info("this device captures no graphs: steps are issued kernel by kernel")
                return
            found.append((size, replay))
            if progress is not None:
                progress(done / len(ordered))
        found.reverse()
        self._sizes, self._replays = [size for size, _ in found], [replay for _, replay in found]

    def fitting(self, rows: int) -> tuple[int, Work] | None:
        """(its number of rows, the graph) for a step of ``rows`` rows; None where there is none so large."""
        at = bisect.bisect_left(self._sizes, rows)
        return (self._sizes[at], self._replays[at]) if rows and at < len(self._sizes) else None
