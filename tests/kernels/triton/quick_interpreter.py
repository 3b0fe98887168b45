"""Triton's interpreter without half of its cost.

Every call of a helper from a kernel makes the interpreter look through all of ``triton.language`` for functions to replace by
its own, which takes longer than most helpers. They are replaced once per launch; it is enough to look whether they are.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Make calls between interpreted functions quicker, for the rest of the process. What they compute stays the same."""
    languages: dict[Any, list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in languages:
            visible = list(self.fn.__globals__.values())
            languages[self.fn] = [module for module in (tl, tl.core) if any(value is module for value in visible)]
        if any(tl.core.is_builtin(module.arange) for module in languages[self.fn]):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
