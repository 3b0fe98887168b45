"""From settings to a model ready to step: device, kernels, types, weights, pages, in this order."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from octavo_executor.device import CpuDevice, CudaDevice, Device
from octavo_executor.graphs import graph_sizes
from octavo_executor.host_pages import HostPages
from octavo_executor.kv_cache import KvCache, PoolRequest, block_bytes, choose_page_dtype, plan_num_host_blocks
from octavo_executor.measure import measure_steps
from octavo_executor.memory import GIB, GpuUse, HostUse, check_host, graph_bytes, plan_pool, step_widths
from octavo_executor.model import Transformer
from octavo_executor.runner import Runner
from octavo_executor.spec import ModelError, ModelSpec, model_fingerprint, read_spec
from octavo_executor.weights import DtypePlan, ModelWeights, choose_dtypes, load_weights
from octavo_kernels import Kernels, choose_kernels
from octavo_shared.plan import ExecutorInfo
from octavo_shared.settings import ExecutorSettings, SettingError

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
# On a GPU a step is bound by arithmetic from some hundred tokens on; 8,192 make launches and the reading of weights small
# beside it. A CPU is bound by arithmetic at once, and a step of 2,048 tokens of a small model already takes seconds, in which
# decodes wait.
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
# Rows of logits held at once on a CPU, where a step that samples more goes through them in parts. A GPU holds all there
# can be: graphs compute a whole batch's.
MAX_LOGITS = 64


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to step, and how it introduces itself."""

    runner: Runner
    info: ExecutorInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a step and of a sequence."""

    block_size: int
    max_num_seqs: int
    max_tokens: int
    max_model_len: int


def choose_device(name: str) -> Device:
    """The device for ``--device`` auto, cpu or cuda; auto is a GPU where torch finds one.

    Raises:
        SettingError: there is no GPU.
    """
    if name == "cpu":
        return CpuDevice()
    try:
        return CudaDevice()
    except ValueError as error:
        if name == "cuda":
            raise SettingError(f"--device cuda: {error}") from error
        return CpuDevice()


def _limits(settings: ExecutorSettings, spec: ModelSpec, device: Device) -> Limits:
    max_num_seqs = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    tokens = settings.max_num_batched_tokens
    if tokens is None:
        tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu" if device.host_memory else "cuda"]
    length = settings.max_model_len or spec.max_positions
    if length > spec.max_positions:
        raise SettingError(f"--max-model-len {length} is more than the {spec.max_positions} positions the model knows")
    return Limits(settings.block_size or DEFAULT_BLOCK_SIZE, max_num_seqs, max(tokens, max_num_seqs), length)


def _kernels(settings: ExecutorSettings, spec: ModelSpec, device: Device, limits: Limits) -> Kernels:
    try:
        return choose_kernels(
            "auto" if device.host_memory else "triton",
            head_dim=spec.head_dim,
            block_size=limits.block_size,
            threads=settings.num_threads,
            device=device.torch_device,
            max_tokens=limits.max_tokens,
            max_seqs=limits.max_num_seqs,
        )
    except ValueError as error:
        raise SettingError(f"--device {settings.device}: {error}, or choose --device cpu") from error


def choose_types(settings: ExecutorSettings, spec: ModelSpec, kernels: Kernels, block_size: int) -> DtypePlan:
    """Types for ``--dtype``, ``--quantization`` and ``--kv-cache-dtype``.

    Raises:
        SettingError: the checkpoint is quantised otherwise, or the backend cannot.
        ModelError: as ``choose_dtypes``.
    """
    found, wanted = spec.quantization, settings.quantization
    if wanted is not None and found is not None and wanted != found.method and (wanted, found.layout) != ("fp8", "fp8"):
        raise SettingError(f"--quantization {wanted}: the checkpoint is quantised already, by {found.method}")
    if wanted not in (None, "fp8") and found is None:
        raise SettingError(f"--quantization {wanted}: the checkpoint is not quantised")
    online = wanted == "fp8" and found is None
    if online and kernels.name == "cpu":
        raise SettingError("--quantization fp8 needs a GPU: a CPU gains nothing from weights in 8 bits here")
    plan = choose_dtypes(settings.dtype, spec.checkpoint_dtype, kernels, quantized=found is not None)
    pages = choose_page_dtype(settings.kv_cache_dtype, plan.kv, spec, block_size, kernels)
    return replace(plan, kv=pages, quantization="fp8" if online else None)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runners are made of."""

    spec: ModelSpec
    weights: ModelWeights
    kernels: Kernels
    dtypes: DtypePlan
    device: Device

    def runner(self, limits: Limits, num_blocks: int, host_blocks: int) -> Runner:
        """One with so many pages of either kind.

        Raises:
            SettingError: that does not fit.
        """
        on_host = self.device.host_memory
        try:
            cache = KvCache(
                self.spec,
                num_blocks,
                limits.block_size,
                self.dtypes.kv,
                self.kernels,
                scales=self.weights.page_scales,
            )
            model = Transformer(
                self.spec,
                self.weights,
                self.kernels,
                cache,
                self.dtypes,
                max_model_len=limits.max_model_len,
                max_tokens=limits.max_tokens,
                max_seqs=limits.max_num_seqs,
                max_logits=min(limits.max_num_seqs, MAX_LOGITS) if on_host else limits.max_num_seqs,
                device=self.device,
            )
            host = HostPages(cache, self.kernels, host_blocks, self.device)
            return Runner(
                model,
                self.kernels,
                cache,
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                host=host,
            )
        except MemoryError as error:
            raise SettingError(f"--kv-offloading-size: {error}") from error


def load_model(settings: ExecutorSettings, incarnation: str, device: Device | None = None) -> LoadedModel:
    """Read weights, make the KV cache, and put the runner together; ``device`` is by default what ``--device`` says.

    Raises:
        SettingError: a setting does not suit the model or the machine.
        ModelError: the folder is not a model that can be served.
    """
    device = device or choose_device(settings.device)
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    folder = Path(settings.model)
    spec = read_spec(folder)
    limits = _limits(settings, spec, device)
    kernels = _kernels(settings, spec, device, limits)
    dtypes = choose_types(settings, spec, kernels, limits.block_size)
    page_bytes = block_bytes(spec, limits.block_size, dtypes.kv, kernels)
    weights = _load_weights(folder, spec, kernels, dtypes)
    parts = _Parts(spec, weights, kernels, dtypes, device)
    host_blocks = plan_num_host_blocks(settings.kv_offloading_size, page_bytes, psutil.virtual_memory().available)
    host_bytes = host_blocks * page_bytes
    request = PoolRequest(
        block_bytes=page_bytes,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        available_bytes=max(psutil.virtual_memory().available - host_bytes, 0),
        num_blocks=settings.num_gpu_blocks_override,
        memory_bytes=settings.kv_cache_memory_bytes,
    )
    graphs: tuple[int, ...] = ()
    if not device.host_memory and not settings.enforce_eager:
        graphs = graph_sizes(limits.max_num_seqs, settings.max_cudagraph_capture_size, settings.cuda_graph_sizes)
    use = None if device.host_memory else _gpu_use(parts, limits, page_bytes, graphs, settings.gpu_memory_utilization)
    num_blocks, length = plan_pool(request, use, fixed_length=settings.max_model_len is not None)
    limits = replace(limits, max_model_len=length)
    if use is None:
        _check_host(limits, spec, dtypes, num_blocks * page_bytes, host_bytes)
    runner = _runner(parts, limits, num_blocks, host_blocks)
    if not device.host_memory:
        runner.warm_up()
    if graphs:
        runner.capture_graphs(graphs, Progress("capturing graphs"))
    info = ExecutorInfo(
        name=settings.executor_name,
        incarnation=incarnation,
        model=settings.model_name,
        fingerprint=model_fingerprint(folder, f"{dtypes.kv} {dtypes.activations} {dtypes.quantization}"),
        num_device_blocks=num_blocks,
        num_host_blocks=host_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_tokens,
        vocab_size=spec.vocab_size,
        kv_dtype=str(dtypes.kv).removeprefix("torch."),
        block_bytes=page_bytes,
        eos_token_ids=spec.eos_token_ids,
        measured=measure_steps(runner, limits.max_tokens),
    )
    return LoadedModel(runner, info)


def _load_weights(folder: Path, spec: ModelSpec, kernels: Kernels, dtypes: DtypePlan) -> ModelWeights:
    try:
        return load_weights(folder, spec, kernels, dtypes, Progress("loading weights"))
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the weights do not fit the GPU's memory: {error}") from error


def _runner(parts: _Parts, limits: Limits, num_blocks: int, host_blocks: int) -> Runner:
    try:
        return parts.runner(limits, num_blocks, host_blocks)
    except torch.OutOfMemoryError as error:
        raise SettingError(f"--gpu-memory-utilization: the KV cache does not fit the GPU after all: {error}") from error


def _gpu_use(parts: _Parts, limits: Limits, page_bytes: int, graphs: tuple[int, ...], utilization: float) -> GpuUse:
    """How a GPU's memory stands, and what steps will take of it: the largest is tried, with no more pages than it needs.

    Raises:
        SettingError: not even the step fits.
    """
    device = parts.device
    before = device.allocated_bytes()
    device.reset_peak()
    pages = -(-(limits.max_tokens // limits.max_num_seqs + 4) // limits.block_size)
    try:
        runner = parts.runner(limits, pages, 0)
        runner.warm_up()
    except torch.OutOfMemoryError as error:
        raise SettingError(
            f"--max-num-batched-tokens or --max-num-seqs: a step does not fit the GPU: {error}"
        ) from error
    peak = device.peak_bytes()
    del runner
    gc.collect()
    # What the kernels have kept is in use now, and was part of the peak, as the pages were.
    step_bytes = max(peak - device.allocated_bytes() - pages * page_bytes, 0)
    memory = device.memory()
    use = GpuUse(
        memory.total_bytes,
        memory.total_bytes - memory.free_bytes,
        step_bytes,
        graph_bytes(graphs, parts.spec.num_layers),
        utilization,
    )
    logger.info(
        "GPU memory: %.2f GiB, of which %.2f in use (%.2f by weights), %.2f for a step, %.2f for %d graphs",
        use.total_bytes / GIB,
        use.used_bytes / GIB,
        before / GIB,
        use.step_bytes / GIB,
        use.graph_bytes / GIB,
        len(graphs),
    )
    return use


def _check_host(limits: Limits, spec: ModelSpec, dtypes: DtypePlan, pool_bytes: int, tier_bytes: int) -> None:
    memory = psutil.virtual_memory()
    step_bytes = limits.max_tokens * step_widths(spec) * dtypes.activations.itemsize
    tables_bytes = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size) * 4
    check_host(HostUse(pool_bytes, tier_bytes, step_bytes, tables_bytes), memory.total, memory.available)


class Progress:
    """Says every so often how much of something has been done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = 0.0
        self._start = time.monotonic()

    def __call__(self, fraction: float) -> None:
        if fraction >= self._next or fraction >= 1.0:
            logger.info("%s: %3.0f %% (%.1f s)", self._what, 100 * fraction, time.monotonic() - self._start)
            self._next = fraction + 0.25
