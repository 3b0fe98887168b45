"""What the core can object to."""


class IntegrityError(AssertionError):
    """An invariant of the core does not hold."""


class NeverFitsError(ValueError):
    """A request that could not run even with the whole pool to itself."""


class OutOfStepError(RuntimeError):
    """A result that does not answer the oldest unacknowledged plan."""
