"""What a captured graph is, without a GPU: calls with the arguments they had when they were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo_executor.device import Work
from octavo_kernels import Kernels


class FrozenKernels:
    """A backend whose calls can be captured: numbers are frozen, tensors are memory, and nothing else is done again."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None = None
        self.replayed = 0

    def record(self) -> None:
        return None

    def capture(self, work: Work) -> Work:
        work()
        self._calls = []
        work()
        calls, self._calls = self._calls, None

        def replay() -> None:
            self.replayed += 1
            for method, args, options in calls:
                method(*args, **options)

        return replay

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            if self._calls is not None:
                self._calls.append((value, args, options))
            return value(*args, **options)

        return call
