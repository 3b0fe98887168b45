"""How many outputs a request makes, how many of them it gives back, and whether they are drawn or searched for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo_gateway.errors import bad_request
from octavo_gateway.schema.requests import GenerationBody
from octavo_shared.records import EarlyStopping
from octavo_shared.settings import GatewaySettings

# Powers of the longest contexts up to this one are finite numbers.
MOST_LENGTH_PENALTY = 10.0

_EARLY_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}


@dataclass(frozen=True, slots=True)
class Choices:
    """``made`` outputs per prompt, of which the ``returned`` best are given back; a beam search makes what it returns.

    ``beam_width`` 0 draws.
    """

    made: int
    returned: int
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


def choices_of(body: GenerationBody, settings: GatewaySettings) -> Choices:
    """Check ``n``, ``best_of`` and what belongs to beam search.

    Raises:
        ApiError: 400 for the first thing that is wrong.
    """
    n = 1 if body.n is None else body.n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.", "n")
    if n > settings.max_n:
        raise bad_request(f"n must be at most {settings.max_n}, got {n}.", "n")
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise bad_request(f"best_of must be greater than or equal to n, got n={n} and best_of={best_of}.", "best_of")
    if best_of > settings.max_n:
        raise bad_request(f"best_of must be at most {settings.max_n}, got {best_of}.", "best_of")
    if body.use_beam_search:
        return _beams(body, n, best_of)
    if body.length_penalty not in (None, 1.0):
        raise bad_request("length_penalty has no effect and must be 1.0 when not using beam search.", "length_penalty")
    if body.early_stopping:
        raise bad_request(
            "early_stopping has no effect and must be False when not using beam search.", "early_stopping"
        )
    if best_of > n and body.stream:
        raise bad_request(
            f"Results cannot be streamed when best_of is greater than n, got n={n} and best_of={best_of}.", "best_of"
        )
    return Choices(best_of, n)


def _beams(body: GenerationBody, n: int, width: int) -> Choices:
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not math.isfinite(penalty) or abs(penalty) > MOST_LENGTH_PENALTY:
        raise bad_request(
            f"length_penalty must be in [-{MOST_LENGTH_PENALTY:g}, {MOST_LENGTH_PENALTY:g}], got {penalty}.",
            "length_penalty",
        )
    return Choices(n, n, width, penalty, _EARLY_STOPPING[body.early_stopping or False])
