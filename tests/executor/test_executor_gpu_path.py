"""What a GPU would run, on a CPU: Triton's kernels by its interpreter, steps under way, decodes from captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen_kernels import FrozenKernels
from late_device import LateDevice
from plan_maker import PlanMaker, make_kernels, make_runner
from tiny_models import random_tokens, save_tiny_model

from octavo_executor.batch import BatchState
from octavo_executor.device import Device
from octavo_executor.graphs import DecodeGraphs, graph_sizes
from octavo_executor.runner import Runner
from octavo_executor.warm_up import warm_up_plans
from octavo_kernels import Kernels
from octavo_shared.plan import StepOutput
from octavo_shared.records import SamplingParams
from octavo_shared.settings import SettingError

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is off: these tests need the interpreter", allow_module_level=True)

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
BLOCK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder, num_hidden_layers=1)
    return folder


def outputs(runner: Runner) -> list[StepOutput]:
    """A prompt beside a chunk of another one, then decodes over the border of a page; a page goes out and comes back."""
    maker = PlanMaker(runner)
    first, second = maker.admit(random_tokens(7, 1), GREEDY), maker.admit(random_tokens(12, 2), GREEDY)
    plans = [
        maker.plan([(first, 7), (second, 5)]),
        maker.plan([(first, 1), (second, 7)]),
        maker.plan([(first, 1), (second, 1)]),
        maker.plan([(second, 1)]),
    ]
    done, under_way = [], []
    for plan in plans:
        under_way.append(runner.launch(plan))
        if len(under_way) == runner.depth:
            done.append(runner.collect(under_way.pop(0)))
    return done + [runner.collect(step) for step in under_way]


def tokens(done: list[StepOutput]) -> list[list[int]]:
    return [output.result.tokens.tolist() for output in done]


def make(folder: Path, kernels: Kernels, device: Device | None, page_dtype: str = "auto") -> Runner:
    return make_runner(
        folder, block_size=BLOCK, kernels=kernels, device=device, graph_sizes=(2,), page_dtype=page_dtype
    )


def test_steps_under_way_and_graphs_by_triton(folder: Path) -> None:
    kernels = FrozenKernels(make_kernels("triton", 16, BLOCK))
    got = outputs(make(folder, kernels, LateDevice("compute first", capture=kernels.capture)))
    assert tokens(got) == tokens(outputs(make(folder, make_kernels("cpu", 16, BLOCK), None)))
    assert kernels.replayed == 2


@pytest.mark.parametrize(("backend", "page_dtype"), [("reference", "fp8"), ("triton", "int8")])
def test_quantised_pages(folder: Path, backend: str, page_dtype: str) -> None:
    kernels = make_kernels(backend, 16, BLOCK)
    got = outputs(make(folder, kernels, LateDevice(3), page_dtype))
    assert tokens(got) == tokens(outputs(make(folder, kernels, None, page_dtype)))
    assert all(row.problem is None for output in got for row in output.rows)


@pytest.mark.parametrize("device", [None, LateDevice(2)])
def test_a_warm_up_fills_a_step_and_leaves_nothing(folder: Path, device: LateDevice | None) -> None:
    runner = make_runner(folder, device=device, host_pages=2)
    rows: list[int] = []
    forward = runner._model.forward
    runner._model.forward = lambda n, bounds=None: (rows.append(n), forward(n, bounds))[1]  # type: ignore[method-assign]
    runner.warm_up()
    # 128 tokens are 21 for each of 6 sequences.
    assert rows == [126, 6, 1, 1]
    assert not runner.state.live.any()
    expected = make_runner(folder)
    prompt = random_tokens(9, 3)
    drawn = []
    for one in (runner, expected):
        maker = PlanMaker(one)
        sequence = maker.admit(prompt, GREEDY)
        maker.finish(sequence)
        drawn.append(sequence.tokens)
    assert drawn[0] == drawn[1]


def test_a_warm_up_has_a_long_sequence_where_there_can_be_one() -> None:
    state = BatchState(max_seqs=4, max_model_len=2000, block_size=16, num_blocks=100, eos=frozenset())
    rows = []
    for plan in warm_up_plans(state, 1500, 0):
        state.apply(plan)
        state.num_computed[plan.row_slots] = plan.row_starts + plan.row_tokens
        state.expect(plan.sample_slots)
        rows.append((len(plan.row_slots), int(plan.row_starts[0]), int(plan.row_tokens[0])))
        needed = state.num_computed[plan.row_slots]
        assert (state.table_len[plan.row_slots] * 16 >= needed).all()
    assert rows == [(4, 0, 375), (4, 375, 1), (1, 376, 1), (1, 0, 1), (1, 0, 1024), (1, 1024, 1)]


def test_graphs_by_number_of_rows() -> None:
    assert graph_sizes(256)[:6] == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(256)[-1] == 256
    assert graph_sizes(1024)[-3:] == (480, 496, 512)
    assert graph_sizes(100)[-2:] == (96, 100)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(256, largest=20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256, given=(64, 3, 300)) == (3, 64)
    for options, name in (
        ({"given": (0,)}, "--cuda-graph-sizes 0"),
        ({"largest": 0}, "--max-cudagraph-capture-size 0"),
    ):
        with pytest.raises(SettingError, match=name):
            graph_sizes(8, **options)  # type: ignore[arg-type]


def test_the_smallest_graph_that_has_room_is_replayed() -> None:
    captured: list[int] = []
    device = LateDevice(1, capture=lambda work: work)
    graphs = DecodeGraphs(device)
    shares: list[float] = []
    graphs.capture((4, 1, 8), lambda size: lambda: captured.append(size), shares.append)
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])
    for rows, size in ((1, 1), (2, 4), (4, 4), (5, 8), (8, 8)):
        fitting = graphs.fitting(rows)
        assert fitting is not None
        fitting[1]()
        assert fitting[0] == captured[-1] == size
    assert graphs.fitting(9) is None
    assert graphs.fitting(0) is None
