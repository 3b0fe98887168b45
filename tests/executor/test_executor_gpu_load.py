"""A model loaded for a GPU, with a device that has only its figures and its lateness: Triton's kernels by the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from plan_maker import PlanMaker
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.device import DeviceMemory, Work
from octavo_executor.load import LoadedModel, load_model
from octavo_executor.memory import graph_bytes
from octavo_executor.runner import Runner
from octavo_shared.records import SamplingParams
from octavo_shared.settings import ExecutorSettings, SettingError, load_settings

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is off: these tests need the interpreter", allow_module_level=True)

MIB = 2**20
TOTAL, USED, STEP = 64 * MIB, 20 * MIB, 3 * MIB
LIMITS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 200, "block_size": 8}
# Of keys and values of a layer with 2 heads of 16, in float32. A trial needs one of them.
PAGE = 2 * 2 * 16 * 8 * 4


class PretendedGpu(LateDevice):
    """Figures of memory, and graphs that are their work done again."""

    def __init__(self) -> None:
        self.graphs = 0
        super().__init__("compute first", capture=self._capture_one)

    def _capture_one(self, work: Work) -> Work:
        self.graphs += 1
        return work

    def memory(self) -> DeviceMemory:
        return DeviceMemory(TOTAL - USED, TOTAL)

    def peak_bytes(self) -> int:
        return STEP + PAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu")
    save_tiny_model("llama", path, num_hidden_layers=1)
    return path


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are not tried: here they give no figures, and the interpreter takes its time over them."""
    monkeypatch.setattr(Runner, "warm_up", lambda runner: None)
    monkeypatch.setattr("octavo_executor.load.measure_steps", lambda runner, max_tokens: ())


def loaded(folder: Path, device: PretendedGpu, **flags: Any) -> LoadedModel:
    return load_model(load_settings(ExecutorSettings, model=str(folder), **LIMITS | flags), "e", device)


@pytest.mark.usefixtures("untried")
def test_pages_fill_what_is_left(folder: Path) -> None:
    device = PretendedGpu()
    info = loaded(folder, device).info
    graphs = graph_bytes((1, 2, 3), 1)
    assert info.block_bytes == PAGE
    assert info.num_device_blocks == (int(0.9 * TOTAL) - USED - STEP - graphs) // PAGE
    assert (info.max_num_batched_tokens, info.max_num_seqs, info.kv_dtype) == (12, 3, "float32")
    assert device.graphs == 3


@pytest.mark.parametrize(
    ("flags", "graphs", "blocks"),
    [
        ({"enforce_eager": True}, 0, (int(0.9 * TOTAL) - USED - STEP) // PAGE),
        ({"cuda_graph_sizes": [2], "num_gpu_blocks_override": 40}, 1, 40),
        ({"max_cudagraph_capture_size": 2, "kv_cache_memory_bytes": 50 * PAGE}, 2, 50),
        ({"gpu_memory_utilization": 0.5, "enforce_eager": True}, 0, (32 * MIB - USED - STEP) // PAGE),
        ({"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 50 * PAGE}, 3, 200),
    ],
)
@pytest.mark.usefixtures("untried")
def test_settings_of_a_gpu(folder: Path, flags: dict[str, Any], graphs: int, blocks: int) -> None:
    device = PretendedGpu()
    assert loaded(folder, device, **flags).info.num_device_blocks == blocks
    assert device.graphs == graphs


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpu_memory_utilization": 0.3}, "--gpu-memory-utilization 0.3: .* nothing is left"),
        ({"num_gpu_blocks_override": 24}, "--num-gpu-blocks-override gives .* --max-model-len 200"),
        ({"kv_cache_memory_bytes": TOTAL}, "--kv-cache-memory-bytes: .* does not fit"),
    ],
)
@pytest.mark.usefixtures("untried")
def test_memory_that_does_not_suffice(folder: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loaded(folder, PretendedGpu(), **flags)


def test_a_step_that_does_not_fit_names_the_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: Runner) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Runner, "warm_up", no_room)
    with pytest.raises(SettingError, match="--max-num-batched-tokens or --max-num-seqs: a step does not fit"):
        loaded(folder, PretendedGpu())


def test_what_is_loaded_generates_as_on_a_cpu(folder: Path) -> None:
    """Steps tried, then a prompt, and decodes from graphs: greedy tokens equal those of the CPU's kernels."""
    prompt = random_tokens(11, 2)
    flags = {"num_gpu_blocks_override": 40, "num_threads": 1}
    models = [
        loaded(folder, PretendedGpu(), **flags),
        load_model(load_settings(ExecutorSettings, model=str(folder), device="cpu", **LIMITS | flags), "e"),
    ]
    tokens = []
    for model in models:
        maker = PlanMaker(model.runner)
        sequence = maker.admit(prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        for count in (7, 4, 1, 1, 1, 1):
            maker.step((sequence, count))
        tokens.append(sequence.tokens)
    assert len(tokens[0]) == 5
    assert tokens[0] == tokens[1]
