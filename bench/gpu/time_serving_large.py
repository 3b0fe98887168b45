"""As time_serving, of a larger model: a section of its own, since it may not fit into the time."""

from __future__ import annotations

from time_serving import run_large as run

__all__ = ["run"]
