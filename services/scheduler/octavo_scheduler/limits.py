"""What gateways are told so that they can refuse early and truthfully (rule L14)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo_scheduler.backlog import Backlog
from octavo_scheduler.engine import Engine, choose_engine
from octavo_shared.records import ModelLimits
from octavo_shared.settings import SchedulerSettings

# Without --max-queued-tokens: so many times what the caches of all executors hold. A full cache turns over in about the
# time its requests take, so this is about that many times as long a wait. Small caches get as much as LEAST_QUEUED_TOKENS.
QUEUED_PER_CACHED = 16
LEAST_QUEUED_TOKENS = 1 << 18


def bound_on_queued_tokens(settings: SchedulerSettings, engines: Sequence[Engine]) -> int:
    """Most tokens of work that may be queued; 0 = no bound."""
    if settings.max_queued_tokens is not None:
        return settings.max_queued_tokens
    cached = sum(engine.info.num_device_blocks * engine.info.block_size for engine in engines)
    return max(QUEUED_PER_CACHED * cached, LEAST_QUEUED_TOKENS)


def model_limits(settings: SchedulerSettings, term: int, engines: Sequence[Engine], backlog: Backlog) -> ModelLimits:
    """The limits as of now: of sizes the greatest among executors counts, of work all of it."""
    now = time.monotonic()
    standing = backlog.standing(one for engine in engines for one in engine.progress())
    alive = [engine for engine in engines if engine.is_making_progress(now)]
    infos = [engine.info for engine in engines]
    configs = [engine.core.config for engine in engines]
    # Where the next request will most likely go.
    next_one = choose_engine(alive or engines, now)
    times = [engine.times for engine in alive or engines if engine.times.knows]
    count = max(len(times), 1)
    rate = sum(engine.rate.tokens_per_s for engine in alive)
    # A new epoch begins without a rate; the one before it is a better guess than none.
    backlog.last_tokens_per_s = rate or backlog.last_tokens_per_s
    return ModelLimits(
        model=settings.model_name,
        max_model_len=max((config.max_model_len for config in configs), default=0),
        pool_tokens=max((info.num_device_blocks * info.block_size for info in infos), default=0),
        vocab_size=min((info.vocab_size for info in infos), default=0),
        ready=bool(alive),
        reason="" if alive else "no executor makes progress" if engines else "no executor is attached",
        executors=len(alive),
        term=term,
        max_num_seqs=max((config.max_num_seqs for config in configs), default=0),
        queued_tokens=standing.queued_tokens,
        tokens_per_s=backlog.last_tokens_per_s,
        max_queued_tokens=bound_on_queued_tokens(settings, engines),
        expected_outputs=backlog.lengths.curve(),
        prompt_token_s=sum(one.prompt_token_s for one in times) / count,
        step_s=next_one.next_step_s if next_one is not None and next_one.times.knows else 0.0,
        prompt_s=sum(one.prompt_s for one in times) / count,
        lone_step_s=sum(one.decode_s(1) for one in times) / count,
        slot_wait_s=next_one.slot_wait_s(backlog.mean_output) if next_one is not None else 0.0,
        prompts_ahead=standing.prompts_ahead,
        max_queue_wait_s=settings.max_queue_wait,
        max_ttft_ratio=settings.max_ttft_ratio,
    )
