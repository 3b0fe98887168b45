"""Every command of docs/memory.md does what the page says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from e2e_stack import Stack

ROOT = Path(__file__).parents[2]


def bash_blocks() -> list[str]:
    """What a reader would paste into a shell."""
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_memory_is_looked_at(stack: Stack) -> None:
    looking, _ = bash_blocks()
    stack.wait_idle()
    script = looking.replace("http://127.0.0.1:8000", stack.url)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True).stdout
    decoder, answers = json.JSONDecoder(), []
    while printed:
        answer, end = decoder.raw_decode(printed)
        answers.append(answer)
        printed = printed[end:].lstrip()
    by_kind = {answer["object"]: answer for answer in answers}
    assert len(by_kind["text_completion"]["choices"]) == 8
    assert max(map(len, by_kind["kv"]["columns"]["owners"])) == 8
    assert by_kind["kv"]["totals"]["saved_blocks"] >= 7
    assert by_kind["cache.reset"]["blocks"] > 0
    stack.wait_idle()


def test_the_targets_are_the_benchmarks() -> None:
    _, measuring = bash_blocks()
    for command, script in zip(measuring.splitlines(), ("bench/scheduler", "bench/host_tier.py"), strict=True):
        done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == script
