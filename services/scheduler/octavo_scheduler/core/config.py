"""What the core must know about its executor and its operator's wishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes are in tokens unless the name says otherwise.

    ``fingerprint`` is everything that must match for a block to be reusable (weights, config, dtypes).
    ``long_prefill_token_threshold`` 0 means no limit. ``run_ahead`` is how many plans may be unacknowledged beyond the
    one that runs.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    fingerprint: str = ""
    policy: PolicyName = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    run_ahead: int = 1

    @property
    def max_blocks_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_concurrency(self) -> float:
        """How many sequences of full length the pool holds at once."""
        return self.num_blocks / self.max_blocks_per_seq
