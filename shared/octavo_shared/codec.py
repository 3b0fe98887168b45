"""The parts that log entries and requests are made of on the wire: arrays, log-probabilities, problems, beams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from octavo_shared.proto import log_pb2
from octavo_shared.records import Problem, TokenLogprobs

NO_LOGPROB = TokenLogprobs(float("nan"), 0)


class MalformedEntryError(ValueError):
    """Bytes in a stream that are not what the contract says."""


def pack_ints(values: Iterable[int], dtype: str = "<i4") -> bytes:
    """Integers as a little-endian array."""
    return np.fromiter(values, dtype).tobytes()


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers as a little-endian float32 array."""
    return np.fromiter(values, "<f4").tobytes()


def unpack(data: bytes, dtype: str = "<i4") -> npt.NDArray[np.generic]:
    """A read-only view of a little-endian array."""
    return np.frombuffer(data, dtype)


def check_counts(counts: npt.NDArray[np.generic], total: int) -> None:
    """Counts that do not add up to the column they divide would shift what belongs to one row into another."""
    column = counts.astype(np.int64)
    if (column < 0).any() or int(column.sum()) != total:
        raise MalformedEntryError("counts and the column they divide do not agree")


def logprobs_to_proto(entries: Sequence[TokenLogprobs]) -> log_pb2.Logprobs:
    """The wire form of a run of log-probabilities."""
    tops = [pair for entry in entries for pair in entry.top]
    return log_pb2.Logprobs(
        sampled=pack_floats(entry.logprob for entry in entries),
        ranks=pack_ints(entry.rank for entry in entries),
        top_counts=pack_ints(len(entry.top) for entry in entries),
        top_ids=pack_ints(token for token, _ in tops),
        top_values=pack_floats(value for _, value in tops),
    )


def logprobs_from_proto(message: log_pb2.Logprobs) -> list[TokenLogprobs]:
    """A run of log-probabilities.

    Raises:
        ValueError: its columns do not fit together.
    """
    ids, values = unpack(message.top_ids).tolist(), unpack(message.top_values, "<f4").tolist()
    entries, start = [], 0
    rows = (unpack(message.sampled, "<f4"), unpack(message.ranks), unpack(message.top_counts))
    check_counts(rows[2], len(ids))
    for logprob, rank, count in zip(*(column.tolist() for column in rows), strict=True):
        top = tuple(zip(ids[start : start + count], values[start : start + count], strict=True))
        entries.append(TokenLogprobs(logprob, rank, top))
        start += count
    return entries


def problem_to_proto(problem: Problem) -> log_pb2.Problem:
    """The wire form of a problem."""
    return log_pb2.Problem(
        status=problem.status,
        type=problem.type,
        code=problem.code,
        param=problem.param,
        message=problem.message,
    )


def problem_from_proto(message: log_pb2.Problem) -> Problem:
    """A problem."""
    return Problem(message.message, message.status, message.type, message.code, message.param)
