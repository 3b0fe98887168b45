"""What a step's result says: checked against the plan it answers, then taken in."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.errors import OutOfStepError
from octavo_scheduler.core.in_flight import SentPlan
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_scheduler.core.slots import SlotTable
from octavo_shared.plan import StepResult
from octavo_shared.records import EndReason

_LAST_END = max(EndReason)


def check_result(result: StepResult, epoch: tuple[int, int], sent: deque[SentPlan], alive: Container[int]) -> bool:
    """Does a result answer the oldest plan ``sent`` in (term, epoch), every sample of it once?

    True: it is plain, one token for each sample and nothing else, as nearly always.

    Raises:
        OutOfStepError: it does not.
    """
    if not sent or (result.term, result.epoch, result.step) != (*epoch, sent[0].step):
        raise OutOfStepError(f"result of step {result.step} is not the one awaited")
    if result.failed:
        raise OutOfStepError(f"step {result.step} failed: {result.message}")
    plan, counts, ends = sent[0], result.sample_counts, result.ends
    plain = plan.beams is None and np.count_nonzero(counts == 1) == len(counts)
    if plain and len(counts) == len(ends) == len(plan.sampled) == len(result.tokens) and not len(result.scores):
        if np.count_nonzero(ends) and int(ends.max()) > _LAST_END:
            raise OutOfStepError(f"result of step {result.step} has impossible ends")
        return True
    if not len(counts) == len(ends) == len(plan.sampled) or int(counts.sum()) != len(result.tokens):
        raise OutOfStepError(f"result of step {result.step} does not answer every sample")
    # Seen as unsigned, a negative count is a large one.
    most = int(counts.view(np.uint32).max())
    if int(ends.max()) > _LAST_END or (most > 1 and not _only_beams(plan, counts, most)):
        raise OutOfStepError(f"result of step {result.step} has impossible counts or ends")
    if len(result.scores) != _num_scores(plan, counts):
        raise OutOfStepError(f"result of step {result.step} does not score every candidate")
    silent = plan.sample_uids[(counts + ends == 0).nonzero()[0]].tolist()
    if any(uid in alive for uid in silent):
        raise OutOfStepError(f"result of step {result.step} skips a sequence that has not ended")
    return False


def _only_beams(plan: SentPlan, counts: npt.NDArray[np.int32], most: int) -> bool:
    """Only samples of beams have more than one token."""
    return plan.beams is not None and most < 1 << 24 and bool(plan.beams[counts > 1].all())


def _num_scores(plan: SentPlan, counts: npt.NDArray[np.int32]) -> int:
    return 0 if plan.beams is None else int(counts[plan.beams].sum())


def commit_tokens(
    plan: SentPlan, result: StepResult, plain: bool, table: SlotTable, sequences: dict[int, Sequence]
) -> None:
    """Sampled tokens become known: at once for slots still held, one by one for sequences let go meanwhile."""
    if plain and plan.version == table.version:
        table.append(plan.sample_rows, result.tokens)
        return
    counts = result.sample_counts
    held = table.uid_of_slot[plan.sample_slots] == plan.sample_uids
    drawn = counts > 0
    if plan.beams is not None:
        drawn &= ~plan.beams
    here = held & drawn
    first = np.cumsum(counts) - counts
    table.append(table.row_of_slot[plan.sample_slots[here]], result.tokens[first[here]])
    for sample in (~held & drawn).nonzero()[0].tolist():
        sequence = sequences.get(int(plan.sample_uids[sample]))
        if sequence is not None and sequence.slot == NO_SLOT:
            sequence.tokens = np.append(sequence.tokens, result.tokens[first[sample]])
