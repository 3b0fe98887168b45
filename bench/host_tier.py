"""What the host tier is worth under constant preemption: recomputing only, against moving pages out and back.

    python bench/host_tier.py [--requests 48] [--real]

The real core drives a simulated executor, whose steps take ``prefill_s_per_token`` x tokens + ``restore_s_per_page`` x pages
restored, and which reports just that; so the figures are the same on every machine. Two workloads, each on a device pool of
a tenth of what it would like to hold:

* preemption: outputs that the core takes for short ones and that are not, so that sequences are pushed out all the time;
* conversations: everyone comes back with a longer prompt after all others had their turn.

Columns: what a restored page costs over a computed one; output tokens per second with the host tier over those without (and
what that becomes where pages moved out take as long as pages moved back, and nothing else happens meanwhile); tokens
computed again, as a share of all that had to be computed; pages moved.

``--real`` adds a row for each workload on the default model (CPU, one thread), with the costs as measured. It takes minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.in_process import InProcess, Runner
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.forecast import LengthForecast
from octavo_scheduler.core.scheduler import Scheduler
from octavo_shared.ids import RequestId
from octavo_shared.plan import NewSequence, OutputRow, StepOutput, StepPlan, StepResult, StepTimings
from octavo_shared.records import EndReason, Int32Array, RequestRecord, SamplingParams

BLOCK_SIZE = 16
PREFILL_S_PER_TOKEN = 1e-4
# A page restored over a page computed.
COST_RATIOS = (0.01, 0.1, 0.25, 0.5, 0.9, 2.0)


class SimulatedExecutor:
    """Carries plans out in no time and reports how long they would have taken."""

    def __init__(self, restore_s_per_page: float) -> None:
        self._restore_s_per_page = restore_s_per_page
        # By slot: who has it, and how many tokens it has.
        self._sequences: dict[int, NewSequence] = {}
        self._lengths: dict[int, int] = {}
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        """One token for every sample; sequences end by their length, and are no rows from then on."""
        for slot in plan.release.tolist():
            del self._sequences[slot], self._lengths[slot]
        for new in plan.admit:
            self._sequences[new.slot], self._lengths[new.slot] = new, len(new.tokens)
        running = {slot for slot in self._sequences if not self._is_over(slot)}
        rows = zip(plan.row_slots.tolist(), plan.row_tokens.tolist(), strict=True)
        forward_s = PREFILL_S_PER_TOKEN * sum(count for slot, count in rows if slot in running)
        restore_s = self._restore_s_per_page * len(plan.restores)
        self.seconds += forward_s + restore_s
        slots = plan.sample_slots.tolist()
        written = [self._draw(slot) for slot in slots if slot in running]
        result = StepResult(
            plan.term,
            plan.epoch,
            plan.step,
            np.array([slot in running for slot in slots], np.int32),
            np.array([row.tokens[0] for row in written], np.int32),
            np.array([slot in running and self._is_over(slot) for slot in slots], np.uint8) * int(EndReason.LENGTH),
            timings=StepTimings(forward_s=forward_s, restore_s=restore_s),
        )
        return StepOutput(result, tuple(written))

    def _is_over(self, slot: int) -> bool:
        return self._lengths[slot] >= self._sequences[slot].max_total_tokens

    def _draw(self, slot: int) -> OutputRow:
        """A token that follows from whose it is and where it stands."""
        sequence, length = self._sequences[slot], self._lengths[slot]
        self._lengths[slot] = length + 1
        token = (sequence.request_id.serial * 7919 + length * 104729) % 30_000
        end = int(EndReason.LENGTH) if self._is_over(slot) else 0
        position = length - sequence.output_start
        return OutputRow(sequence.request_id, sequence.choice, sequence.attempt, position, (token,), end)


class TimedRunner:
    """A real runner, and how long it took."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        """As the runner does."""
        begun = time.perf_counter()
        output = self._runner.execute(plan)
        self.seconds += time.perf_counter() - begun
        return output


class Careless(LengthForecast):
    """Expects of everyone to be about to end."""

    def remaining(self, generated: Int32Array, limit: Int32Array) -> Int32Array:
        """Nothing is still to come."""
        return np.zeros_like(generated)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a workload is. Prompts are of ``prompt`` / 2 to ``prompt`` * 3 / 2 tokens; turns after the first add half."""

    requests: int
    prompt: int
    output: int
    turns: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there may be."""
        return self.prompt * 3 // 2 + self.output + (self.turns - 1) * (self.prompt // 2 + self.output)

    @property
    def demand(self) -> int:
        """Blocks that all sequences would hold at their ends."""
        return self.requests * -(-(self.longest - self.prompt // 2) // BLOCK_SIZE)

    @property
    def device_blocks(self) -> int:
        """A tenth of that, but room for the longest."""
        return max(self.demand // 10, -(-self.longest // BLOCK_SIZE))


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seconds: float = 0.0
    outputs: int = 0
    needed: int = 0
    computed: int = 0
    saved: int = 0
    restored: int = 0
    preemptions: int = 0

    @property
    def again(self) -> float:
        """Tokens computed again over tokens that had to be computed."""
        return self.computed / self.needed - 1


def run(core: Scheduler, runner: SimulatedExecutor | TimedRunner, size: Size) -> Outcome:
    """All turns, each when everybody has had the one before."""
    process, outcome, rng = InProcess(core, runner), Outcome(), np.random.default_rng(0)
    contexts = [np.empty(0, np.int32)] * size.requests
    for turn in range(size.turns):
        records = []
        for i, context in enumerate(contexts):
            length = size.prompt // 2 if turn else int(rng.integers(size.prompt // 2, size.prompt * 3 // 2 + 1))
            prompt = np.concatenate([context, rng.integers(1000, 30_000, length, dtype=np.int32)])
            sampling = SamplingParams(temperature=0.0, max_tokens=size.output, ignore_eos=True)
            records.append(RequestRecord(RequestId("bench", turn * size.requests + i), 0, prompt, sampling))
            # The last token of a turn is computed with the next one.
            outcome.needed += length + size.output - (turn == 0)
        choices = process.run(records)
        for i, record in enumerate(records):
            outputs = choices[record.id.serial, 0].tokens
            outcome.outputs += len(outputs)
            contexts[i] = np.concatenate([record.prompt, np.array(outputs, np.int32)])
    outcome.seconds = runner.seconds
    outcome.computed = core.stats.scheduled_tokens
    outcome.saved, outcome.restored = core.host.saved_blocks, core.host.restored_blocks
    outcome.preemptions = core.stats.preemptions
    return outcome


def simulate(size: Size, host_blocks: int, cost_ratio: float) -> Outcome:
    """One run on the simulated executor."""
    config = CoreConfig(
        num_blocks=size.device_blocks,
        num_host_blocks=host_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=size.requests,
        max_num_batched_tokens=max(2048, size.requests),
        max_model_len=size.longest,
    )
    core = Scheduler(config)
    core.forecast = Careless()
    return run(core, SimulatedExecutor(cost_ratio * BLOCK_SIZE * PREFILL_S_PER_TOKEN), size)


def on_default_model(size: Size, host: bool) -> tuple[Outcome, float]:
    """One run on the real runner, and what a restored page costs over a computed one there (0 = not measured)."""
    from octavo.models import resolve_model
    from octavo_executor.serve import load_model
    from octavo_scheduler.engine import core_config
    from octavo_shared.settings import ExecutorSettings, SchedulerSettings, load_settings

    folder = str(resolve_model(None).path)
    executor = load_settings(
        ExecutorSettings,
        model=folder,
        max_model_len=size.longest,
        max_num_seqs=size.requests,
        num_gpu_blocks_override=size.device_blocks,
        kv_offloading_size=1.0 if host else 0.0,
        num_threads=1,
    )
    model = load_model(executor, "bench")
    core = Scheduler(core_config(model.info, load_settings(SchedulerSettings, model=folder)))
    core.forecast = Careless()
    outcome = run(core, TimedRunner(model.runner), size)
    per_page = BLOCK_SIZE * core.costs.prefill_s_per_token
    return outcome, core.costs.restore_s_per_block / per_page if per_page else 0.0


def row(name: str, without: Outcome, having: Outcome, ratio: float, charged: float | None) -> str:
    """A line of the table."""
    gain = (having.outputs / having.seconds) / (without.outputs / without.seconds)
    with_saves = "" if charged is None else f"{gain * having.seconds / (having.seconds + charged):.2f}"
    return (
        f"| {name} | {ratio:.3g} | {gain:.2f} | {with_saves} | {100 * without.again:.0f} % | {100 * having.again:.0f} % | "
        f"{having.saved} | {having.restored} |"
    )


def sizes(requests: int, prompt: int, output: int) -> dict[str, Size]:
    """Both workloads, about as large as each other."""
    return {
        "preemption": Size(requests, prompt, output, 1),
        "conversations": Size(requests, prompt // 2, output // 4, 4),
    }


def table(workloads: dict[str, Size]) -> Iterator[str]:
    """The simulated rows."""
    yield "| workload | restore : compute | throughput | moving out charged | again, without | again, with | saved | restored |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, size in workloads.items():
        without = simulate(size, 0, 0.0)
        for ratio in COST_RATIOS:
            having = simulate(size, 2 * size.demand, ratio)
            yield row(name, without, having, ratio, having.saved * ratio * BLOCK_SIZE * PREFILL_S_PER_TOKEN)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48, help="sequences of each simulated workload")
    parser.add_argument("--real", action="store_true", help="also measure on the default model")
    arguments = parser.parse_args()
    for line in table(sizes(arguments.requests, 512, 256)):
        print(line, flush=True)
    if arguments.real:
        for name, size in sizes(40, 64, 64).items():
            (without, _), (having, ratio) = (on_default_model(size, host) for host in (False, True))
            print(row(f"{name}, default model", without, having, ratio, None), flush=True)


if __name__ == "__main__":
    main()
