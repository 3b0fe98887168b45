"""Models with random weights made on the device, an executor's runner around them, and requests through core and runner."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stage import Stage
from torch import Tensor

from octavo_executor.device import CpuDevice, CudaDevice, Device
from octavo_executor.graphs import graph_sizes
from octavo_executor.kv_cache import KvCache, block_bytes
from octavo_executor.model import Transformer
from octavo_executor.runner import Runner
from octavo_executor.spec import ModelSpec, spec_from_config
from octavo_executor.step_work import Launched
from octavo_executor.weights import DtypePlan, LayerWeights, ModelWeights
from octavo_kernels import Kernels, choose_kernels
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord, SamplingParams

BLOCK = 16
# Memory left to torch, to graphs and to whatever else.
SPARE_BYTES = 10 << 30

# What the models' authors publish as their config.json, as far as it says anything about shapes.
QWEN3_06B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
LLAMA3_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def config_of(stage: Stage, config: Mapping[str, Any]) -> dict[str, Any]:
    """The model, or a very small one of its family."""
    small = {**TINY, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
    return {**config, **(small if stage.tiny else {})}


def random_weights(stage: Stage, spec: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> ModelWeights:
    """Small normal numbers, as models are initialised with before they are trained; norms are one."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=stage.device).normal_(0.0, 0.02)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=stage.device)

    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    norm = ones(dim) if spec.qk_norm else None

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=ones(hidden),
            qkv=kernels.pack(matrix((spec.num_heads + 2 * spec.num_kv_heads) * dim, hidden), dtype),
            qkv_bias=None,
            q_norm=norm,
            k_norm=norm,
            output=kernels.pack(matrix(hidden, spec.num_heads * dim), dtype),
            output_bias=None,
            mlp_norm=ones(hidden),
            gate_up=kernels.pack(matrix(2 * inner, hidden), dtype),
            gate_up_bias=None,
            down=kernels.pack(matrix(hidden, inner), dtype),
            down_bias=None,
        )

    embedding = kernels.pack(matrix(spec.vocab_size, hidden), dtype)
    head = embedding if spec.tied_embeddings else kernels.pack(matrix(spec.vocab_size, hidden), dtype)
    return ModelWeights(embedding, tuple(layer() for _ in range(spec.num_layers)), ones(hidden), head)


@dataclass
class Engine:
    """A runner and what a core must know of it."""

    runner: Runner
    kernels: Kernels
    weights: ModelWeights
    spec: ModelSpec
    core_config: CoreConfig

    def core(self) -> Scheduler:
        """A core with an empty cache; the runner forgets everything."""
        self.runner.reset()
        return Scheduler(self.core_config)


def build(
    stage: Stage,
    config: Mapping[str, Any],
    *,
    graphs: bool,
    kernels: Kernels | None = None,
    weights: ModelWeights | None = None,
    seq_tokens: int = 1280,
    device: Device | None = None,
) -> Engine:
    """The executor of a model, as ``octavo_executor`` puts it together. ``weights`` of another one are used again.

    There are pages for ``seq_tokens`` tokens of every sequence, or what fits.
    """
    spec = spec_from_config(config_of(stage, config))
    seqs, length, tokens = stage.pick((256, 4096, 8192), (4, 64, 32))
    dtype = stage.pick(torch.bfloat16, torch.float32)
    device = device or (CudaDevice() if stage.mode == "gpu" else CpuDevice())
    kernels = kernels or choose_kernels(
        "triton", head_dim=spec.head_dim, block_size=BLOCK, device=stage.device, max_tokens=tokens, max_seqs=seqs
    )
    weights = weights or random_weights(stage, spec, kernels, dtype)
    stage.wait()
    blocks = seqs * -(-stage.pick(seq_tokens, length) // BLOCK)
    if stage.mode == "gpu":
        page = block_bytes(spec, BLOCK, dtype, kernels)
        blocks = min(blocks, (torch.cuda.mem_get_info()[0] - SPARE_BYTES) // page)
    cache = KvCache(spec, blocks, BLOCK, dtype, kernels)
    limits = {"max_model_len": length, "max_tokens": tokens, "max_seqs": seqs, "max_logits": seqs}
    model = Transformer(spec, weights, kernels, cache, DtypePlan(dtype, dtype, dtype), device=device, **limits)
    runner = Runner(model, kernels, cache, max_num_seqs=seqs, max_model_len=length)
    if stage.mode == "gpu":
        runner.warm_up()
    if graphs:
        begun = time.perf_counter()
        runner.capture_graphs(graph_sizes(seqs))
        print(f"graphs captured in {time.perf_counter() - begun:.1f} s", flush=True)
    core_config = CoreConfig(
        num_blocks=blocks, block_size=BLOCK, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length
    )
    return Engine(runner, kernels, weights, spec, core_config)


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of requests came to."""

    seconds: float
    input_tokens: int
    output_tokens: int
    steps: int
    # Steps of decodes alone: rows, seconds from one result to the next, and of these what the host did not wait for.
    decodes: tuple[tuple[int, float, float], ...]

    def typical(self) -> tuple[int, float, float]:
        """(rows, seconds, the host's own seconds): medians over those steps of decodes that have about the most rows."""
        most = max(rows for rows, _, _ in self.decodes)
        full = [step for step in self.decodes if step[0] >= 0.9 * most]
        rows, seconds, host_s = (statistics.median(column) for column in zip(*full, strict=True))
        return int(rows), seconds, host_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds


def requests(prompts: list[np.ndarray], outputs: list[int], temperature: float) -> list[RequestRecord]:
    """One choice each, of exactly so many tokens."""
    return [
        RequestRecord(
            RequestId("bench", i),
            0,
            prompt.astype(np.int32),
            SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True, seed=i),
        )
        for i, (prompt, most) in enumerate(zip(prompts, outputs, strict=True))
    ]


def add(core: Scheduler, records: list[RequestRecord]) -> None:
    """Requests of one choice each."""
    for record in records:
        core.add([Sequence(record, 0, 1, core.config.max_model_len)])


def serve(engine: Engine, records: list[RequestRecord]) -> Load:
    """All requests at once, through core and runner in one thread; the next step is launched before one is collected."""
    return answers(engine, records)[0]


def answers(engine: Engine, records: list[RequestRecord]) -> tuple[Load, list[list[int]]]:
    """As ``serve``, with the tokens of every request."""
    found: list[list[int]] = [[] for _ in records]
    core, runner = engine.core(), engine.runner
    under_way: deque[Launched] = deque()
    decodes: list[tuple[int, float, float]] = []
    outputs = steps = 0
    waited = 0.0
    begun = last = time.perf_counter()
    add(core, records)
    while core.num_running or core.num_waiting or under_way:
        while len(under_way) < runner.depth and (plan := core.schedule()) is not None:
            under_way.append(runner.launch(plan))
        if not under_way:
            raise RuntimeError("requests are left and nothing can be planned")
        step = under_way.popleft()
        assert step.lane.done is not None
        before = time.perf_counter()
        step.lane.done.synchronize()
        waited += time.perf_counter() - before
        output = runner.collect(step)
        core.commit(output.result)
        core.drain_events()
        core.tidy()
        for row in output.rows:
            found[row.request_id.serial] += row.tokens
            outputs += len(row.tokens)
        steps += 1
        now = time.perf_counter()
        if int(step.rows.counts.max(initial=0)) == 1:
            decodes.append((len(step.rows.slots), now - last, now - last - waited))
        last, waited = now, 0.0
    total = time.perf_counter() - begun
    inputs = sum(len(record.prompt) for record in records)
    return Load(total, inputs, outputs, steps, tuple(decodes)), found


def nano_vllm_workload(count: int = 256, most: int = 1024, least: int = 100, vocab: int = 10000) -> list[RequestRecord]:
    """The requests of nano-vllm's bench.py: seed 0, input and output lengths uniform, temperature 0.6.

    With the default numbers these are its very requests: 133,966 output tokens, as its README says.
    """
    rng = random.Random(0)
    prompts = [np.array([rng.randint(0, vocab) for _ in range(rng.randint(least, most))]) for _ in range(count)]
    return requests(prompts, [rng.randint(least, most) for _ in range(count)], 0.6)


def even_workload(count: int, inputs: int, outputs: int, vocab: int, temperature: float = 0.0) -> list[RequestRecord]:
    """Requests of one length."""
    rng = np.random.RandomState(count)
    return requests([rng.randint(0, vocab, inputs) for _ in range(count)], [outputs] * count, temperature)


def warm(engine: Engine, stage: Stage) -> None:
    """Everything compiled that a run will need: chunks, decodes of many and of one."""
    for record_sets in _warm_sets(stage, engine.spec.vocab_size):
        serve(engine, record_sets)


def _warm_sets(stage: Stage, vocab: int) -> Iterator[list[RequestRecord]]:
    sets = stage.pick(((256, 40, 12), (8, 900, 6), (1, 17, 4)), ())
    for count, inputs, outputs in sets:
        yield even_workload(count, inputs, outputs, vocab, 0.6)
