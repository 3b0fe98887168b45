"""What the scheduler's core costs on one core, without executor, wire or log, beside what it is to cost.

    python bench/scheduler [--steps 400] [--blocks 1000000] [--profile]

Steady decode: every running sequence gets one token per step, one plan ahead, with nobody and with 100,000 waiting. The
ratios are the claims: those who wait should cost nothing, and a step as much as so many numpy calls. Times are processor time
of one thread, and medians: on a machine that does something else besides, the caches are not this program's alone, and times
grow; ratios hardly do.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
from pathlib import Path

from decode import LONG_PROMPT, full_hit_admission, in_turns, steady_decode
from forking import CHOICES, SEARCHES, WIDTH, beam_steps_per_second, forks_per_second

# By running sequences.
STEP_GOALS_US = {256: 150.0, 1024: 250.0}
WAITING = 100_000
WAITING_GOAL = 0.10
ADMISSION_GOAL_US = 1000.0
MEMORY_GOAL_MB = 300.0


def verdict(value: float, goal: float) -> str:
    """How a figure compares with its goal, more being worse."""
    return f"goal {goal:g}: {'met' if value <= goal else f'missed, x{value / goal:.2f}'}"


def report_steps(steps: int) -> None:
    """Steady decode."""
    cases = [(running, waiting) for running in STEP_GOALS_US for waiting in (0, WAITING)]
    costs, addition = in_turns(cases, steps)
    print("steady decode, microseconds per step")
    print(f"{'running':>8} {'waiting':>8} {'schedule + commit':>18} {'p90':>6} {'us/row':>7} {'tidy (mean)':>12}")
    for (running, waiting), cost in costs.items():
        print(
            f"{running:>8} {waiting:>8} {cost.step:>18.0f} {cost.p90:>6.0f} {cost.step / running:>7.2f} {cost.tidy:>12.0f}"
        )
    for running, goal in STEP_GOALS_US.items():
        step = costs[running, 0].step
        print(f"{running} running: {step:.0f} us ({verdict(step, goal)}), as much as {step / addition:.0f} additions")
    for running in STEP_GOALS_US:
        ratio = costs[running, WAITING].step / costs[running, 0].step
        within = "met" if abs(ratio - 1) <= WAITING_GOAL else "missed"
        print(f"{WAITING:,} waiting cost x{ratio:.2f} at {running} running (goal 0.90 to 1.10: {within})")
    few, many = STEP_GOALS_US
    print(f"an addition of two int32[256] with numpy: {addition:.2f} us")
    print(f"{many:,} running cost x{costs[many, 0].step / costs[few, 0].step:.2f} of {few} running")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the pool whose memory is measured")
    parser.add_argument("--profile", action="store_true", help="show where a step at 1,024 running spends its time")
    arguments = parser.parse_args()
    if arguments.profile:
        profile = cProfile.Profile()
        decode = steady_decode(1024, 0, arguments.steps)
        next(decode)
        profile.runcall(lambda: sum(step for step, _ in decode))
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    report_steps(arguments.steps)
    micros = full_hit_admission(50)
    print(f"admission of {LONG_PROMPT:,} tokens, all cached: {micros:.0f} us ({verdict(micros, ADMISSION_GOAL_US)})")
    forks = forks_per_second(max(arguments.steps // 4, 1))
    print(f"forks of {CHOICES}-choice requests, copies on write included: {forks:,.0f} per second")
    searching = beam_steps_per_second(arguments.steps)
    print(f"steps of beam searches of width {WIDTH}, {SEARCHES} at once: {searching:,.0f} per second")
    command = [sys.executable, str(Path(__file__).with_name("memory.py")), str(arguments.blocks)]
    megabytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6
    goal = MEMORY_GOAL_MB * arguments.blocks / 1e6
    print(f"{arguments.blocks:,} blocks, all findable: {megabytes:.0f} MB resident ({verdict(megabytes, goal)})")


if __name__ == "__main__":
    main()
