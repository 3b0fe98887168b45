"""An executor's life: read the model, size the pool, attach, step, and leave nothing unsaid."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from octavo_executor.host_pages import HostPages
from octavo_executor.kv_cache import KvCache, PoolRequest, block_bytes, plan_num_blocks, plan_num_host_blocks
from octavo_executor.logged import LoggedMark
from octavo_executor.model import Transformer
from octavo_executor.outbox import Outbox
from octavo_executor.page_names import PageNameTable
from octavo_executor.runner import Runner
from octavo_executor.session import RefusedError, Session
from octavo_executor.spec import ModelError, ModelSpec, model_fingerprint, read_spec
from octavo_executor.step_loop import StepLoop
from octavo_executor.weights import choose_dtypes, load_weights
from octavo_kernels import choose_kernels
from octavo_shared.ids import mint_incarnation
from octavo_shared.plan import ExecutorInfo
from octavo_shared.settings import ExecutorSettings, SettingError, split_list
from octavo_shared.telemetry import setup_logging

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
FLUSH_S = 5.0
# Rows of logits held at once; a step that samples more goes through them in parts.
MAX_LOGITS = 64


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to step, and how it introduces itself."""

    runner: Runner
    info: ExecutorInfo


def load_model(settings: ExecutorSettings, incarnation: str) -> LoadedModel:
    """Read weights, make the KV cache, and put the runner together.

    Raises:
        SettingError: a setting does not suit the model or the machine.
        ModelError: the folder is not a model that can be served.
    """
    if settings.device == "cuda":
        raise SettingError("--device cuda: this build computes on the CPU")
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    folder = Path(settings.model)
    spec = read_spec(folder)
    block_size = settings.block_size or DEFAULT_BLOCK_SIZE
    kernels = choose_kernels(head_dim=spec.head_dim, block_size=block_size, threads=settings.num_threads)
    dtypes = choose_dtypes(settings.dtype, spec.checkpoint_dtype, kernels)
    max_num_seqs = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    max_tokens = max(settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    page_bytes = block_bytes(spec, block_size, dtypes.kv, kernels)
    max_model_len = _max_model_len(settings, spec)
    weights = load_weights(folder, spec, kernels, dtypes, _Progress())
    host_blocks = plan_num_host_blocks(settings.kv_offloading_size, page_bytes, psutil.virtual_memory().available)
    host_bytes = host_blocks * page_bytes
    num_blocks, max_model_len = _pool(settings, page_bytes, host_bytes, block_size, max_model_len, max_num_seqs)
    _check_memory(
        num_blocks * page_bytes,
        host_bytes,
        max_tokens * _step_widths(spec) * dtypes.activations.itemsize,
        max_num_seqs * -(-max_model_len // block_size) * 4,
    )
    cache = KvCache(spec, num_blocks, block_size, dtypes.kv, kernels)
    transformer = Transformer(
        spec,
        weights,
        kernels,
        cache,
        dtypes,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        max_seqs=max_num_seqs,
        max_logits=min(max_num_seqs, MAX_LOGITS),
    )
    host = HostPages(cache, kernels, host_blocks)
    runner = Runner(transformer, kernels, cache, max_model_len=max_model_len, max_num_seqs=max_num_seqs, host=host)
    info = ExecutorInfo(
        name=settings.executor_name,
        incarnation=incarnation,
        model=settings.model_name,
        fingerprint=model_fingerprint(folder, str(dtypes.kv)),
        num_device_blocks=num_blocks,
        num_host_blocks=host_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        vocab_size=spec.vocab_size,
        kv_dtype=str(dtypes.kv).removeprefix("torch."),
        block_bytes=page_bytes,
        eos_token_ids=spec.eos_token_ids,
    )
    return LoadedModel(runner, info)


def _max_model_len(settings: ExecutorSettings, spec: ModelSpec) -> int:
    if settings.max_model_len is None:
        return spec.max_positions
    if settings.max_model_len > spec.max_positions:
        raise SettingError(
            f"--max-model-len {settings.max_model_len} is more than the {spec.max_positions} positions the model knows"
        )
    return settings.max_model_len


def _pool(
    settings: ExecutorSettings, page_bytes: int, host_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> tuple[int, int]:
    """(number of blocks, model length). A length nobody asked for shrinks to what the pool holds."""

    def blocks_for(length: int) -> int:
        return plan_num_blocks(
            PoolRequest(
                block_bytes=page_bytes,
                block_size=block_size,
                max_model_len=length,
                max_num_seqs=max_num_seqs,
                available_bytes=max(psutil.virtual_memory().available - host_bytes, 0),
                num_blocks=settings.num_gpu_blocks_override,
                memory_bytes=settings.kv_cache_memory_bytes,
            )
        )

    if settings.max_model_len is not None:
        return blocks_for(max_model_len), max_model_len
    try:
        return blocks_for(max_model_len), max_model_len
    except SettingError:
        num_blocks = blocks_for(1)
        shorter = min(max_model_len, num_blocks * block_size)
        logger.warning(
            "the KV cache holds %d tokens: the model length is lowered from %d to that", shorter, max_model_len
        )
        return num_blocks, shorter


def _step_widths(spec: ModelSpec) -> int:
    """Elements that one token takes in the buffers of a step."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    return 3 * spec.hidden_size + heads * spec.head_dim + 3 * spec.intermediate_size


def _check_memory(pool_bytes: int, host_bytes: int, step_bytes: int, tables_bytes: int) -> None:
    """Refuse sizes for which the system would end this process, or others, half-way.

    Raises:
        SettingError: names what is too large.
    """
    memory = psutil.virtual_memory()
    if pool_bytes > memory.total:
        raise SettingError(
            f"--num-gpu-blocks-override or --kv-cache-memory-bytes: a KV cache of {pool_bytes / 2**30:.1f} GiB is more than "
            f"this machine's {memory.total / 2**30:.1f} GiB of memory"
        )
    if pool_bytes + host_bytes > memory.total:
        raise SettingError(
            f"--kv-offloading-size: a host tier of {host_bytes / 2**30:.1f} GiB beside a KV cache of {pool_bytes / 2**30:.1f} GiB "
            f"is more than this machine's {memory.total / 2**30:.1f} GiB of memory"
        )
    if step_bytes + tables_bytes > memory.available:
        raise SettingError(
            f"--max-num-batched-tokens or --max-num-seqs: the buffers of a step would take "
            f"{(step_bytes + tables_bytes) / 2**30:.1f} GiB, more than the {memory.available / 2**30:.1f} GiB that are free"
        )


class _Progress:
    """Says every so often how much of the weights has been read."""

    def __init__(self) -> None:
        self._next = 0.0
        self._start = time.monotonic()

    def __call__(self, fraction: float) -> None:
        if fraction >= self._next or fraction >= 1.0:
            logger.info("loading weights: %3.0f %% (%.1f s)", 100 * fraction, time.monotonic() - self._start)
            self._next = fraction + 0.25


def run(settings: ExecutorSettings) -> int:
    """Run an executor until SIGINT or SIGTERM; returns the exit status."""
    setup_logging("executor", settings.log_level)
    incarnation = mint_incarnation()
    try:
        model = load_model(settings, incarnation)
    except (SettingError, ModelError) as error:
        logger.error("%s", error)
        return 2
    info = model.info
    logger.info(
        "%s ready: %d blocks of %d tokens (%.2f GiB), %d more on the host (%.2f GiB), model length %d",
        info.model,
        info.num_device_blocks,
        info.block_size,
        info.num_device_blocks * info.block_bytes / 2**30,
        info.num_host_blocks,
        info.num_host_blocks * info.block_bytes / 2**30,
        info.max_model_len,
    )
    session = Session(split_list(settings.scheduler_address), info, settings.drain_timeout_s)
    logged = LoggedMark(session.send)
    names = PageNameTable(info.num_device_blocks, info.num_host_blocks, info.block_size)
    outbox = Outbox(
        settings.redis_url,
        settings.model_name,
        incarnation,
        settings.outbox_capacity,
        logged=logged.note,
        broken=session.close,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: session.drain())
    status = 0
    try:
        StepLoop(model.runner, session, outbox, logged, names).run()
    except RefusedError as error:
        logger.error("the scheduler refuses this executor: %s", error)
        status = 2
    finally:
        if not outbox.close(FLUSH_S):
            logger.error("some tokens could not be appended to the log")
            status = 1
        session.close()
        with contextlib.suppress(Exception):
            session.join()
    return status
