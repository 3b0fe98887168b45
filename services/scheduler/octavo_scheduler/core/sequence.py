"""A sequence: one choice of a request, with the tokens it has so far."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence
from octavo_shared.records import Int32Array, RequestRecord, SamplingParams

if TYPE_CHECKING:
    from octavo_scheduler.core.beam_groups import BeamGroup

NO_SLOT = -1


class State(Enum):
    """Where a sequence is."""

    # Waits for the first sequence of its request to have computed the prompt they share: it will be forked from it.
    FOLLOWING = "following"
    WAITING = "waiting"
    # Pages it will start on are on their way from the host to the device.
    RESTORING = "restoring"
    RUNNING = "running"
    # A beam that has been computed and has no slot; it waits for its siblings.
    IDLE = "idle"
    ENDED = "ended"


class Sequence:
    """A prompt, its outputs so far, and where it stands. Owned by ``Scheduler``; others only read.

    A resumed sequence (after preemption, crash or restart) is a new one whose prompt is prompt + tokens so far;
    ``output_start`` marks where outputs begin (rule L11).
    """

    __slots__ = (
        "arrival",
        "attempt",
        "beams",
        "chain",
        "choice",
        "computed",
        "last_step",
        "max_total_tokens",
        "num_findable",
        "output_start",
        "parent",
        "preemptions",
        "record",
        "restores",
        "root",
        "slot",
        "state",
        "tokens",
        "uid",
    )

    def __init__(self, record: RequestRecord, choice: int, attempt: int, max_model_len: int) -> None:
        self.record = record
        self.choice = choice
        self.attempt = attempt
        self.output_start = len(record.prompt)
        self.max_total_tokens = min(self.output_start + record.sampling.max_tokens, max_model_len)
        # Known tokens while it has no slot; while it runs they stand in its row of the slot table.
        self.tokens: Int32Array = record.prompt
        # Set by the scheduler that takes it.
        self.uid = -1
        self.arrival = -1
        self.slot = NO_SLOT
        self.state = State.WAITING
        # Hashes of its leading full blocks, as far as they were needed.
        self.chain: list[bytes] = []
        self.root = b""
        # How many of its leading blocks can be found in the prefix cache, and the number of the last one's content.
        self.num_findable = 0
        self.parent = 0
        # The last plan that named it, as of when it had a slot.
        self.last_step = 0
        self.preemptions = 0
        # Tokens that have been computed before, as of when it had a slot.
        self.computed = 0
        # The search it is a hypothesis of.
        self.beams: BeamGroup | None = None
        # How often pages were restored for it since it last had a slot.
        self.restores = 0

    def resume_with(self, outputs: list[int]) -> None:
        """Start from outputs that are in the log already."""
        self.tokens = np.concatenate([self.record.prompt, np.array(outputs, np.int32)])

    @property
    def request_id(self) -> RequestId:
        return self.record.id

    @property
    def sampling(self) -> SamplingParams:
        return self.record.sampling

    @property
    def num_outputs(self) -> int:
        """Output tokens it has, as far as they are known; while it has no slot."""
        return len(self.tokens) - self.output_start

    @property
    def reads_cache(self) -> bool:
        """Log-probabilities of the prompt need every position computed, unless they have been delivered."""
        return self.sampling.prompt_logprobs is None or len(self.tokens) > self.output_start

    def placed(self, slot: int, blocks: Int32Array, num_computed: int) -> NewSequence:
        """How a plan tells an executor of it: it takes ``slot`` with ``blocks``, ``num_computed`` tokens being there."""
        record = self.record
        return NewSequence(
            slot=slot,
            request_id=record.id,
            choice=self.choice,
            attempt=self.attempt,
            tokens=self.tokens,
            output_start=self.output_start,
            num_computed=num_computed,
            block_table=blocks,
            sampling=record.sampling,
            seed=record.sampling.seed_of(self.choice),
            max_total_tokens=self.max_total_tokens,
            lora=record.lora,
            no_cache_read=not self.reads_cache,
            deadline_us=record.deadline_us,
            traceparent=record.traceparent,
        )
