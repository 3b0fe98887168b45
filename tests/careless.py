"""A forecast that lets everyone in."""

from __future__ import annotations

import numpy as np

from octavo_scheduler.core.forecast import LengthForecast
from octavo_shared.records import Int32Array


class Careless(LengthForecast):
    """Expects every sequence to vanish, so whoever fits at the moment is admitted, and preemption comes as often as it can."""

    def remaining(self, generated: Int32Array, limit: Int32Array) -> Int32Array:
        """Less than nothing."""
        return np.full_like(generated, -(1 << 20))
