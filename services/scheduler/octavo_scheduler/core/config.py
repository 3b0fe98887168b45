"""What the core must know about its executor and its operator's wishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PolicyName = Literal["fcfs", "priority", "fair"]
CacheScope = Literal["global", "tenant", "request"]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes are in tokens unless the name says otherwise.

    ``fingerprint`` is everything that must match for a block to be reusable (weights, config, dtypes).
    ``long_prefill_token_threshold`` and ``max_num_partial_prefills`` 0 mean no limit. ``run_ahead`` is how many plans may be
    unacknowledged beyond the one that runs. ``prefix_cache_scope`` says who may find whose content. ``tenant_weights`` are
    shares under the fair policy, 1 where a tenant is not named.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_host_blocks: int = 0
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    policy: PolicyName = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    run_ahead: int = 1
    prefix_cache_scope: CacheScope = "tenant"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_blocks_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_concurrency(self) -> float:
        """How many sequences of full length the pool holds at once."""
        return self.num_blocks / self.max_blocks_per_seq

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: names the settings that do not go together.
        """
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ValueError("long_prefill_token_threshold cuts prompts into chunks, so it needs chunked prefill")
        if any(not weight > 0 for weight in self.tenant_weights.values()):
            raise ValueError("tenant_weights must be greater than 0")
