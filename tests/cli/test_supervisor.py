"""The supervisor with small real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from octavo.child import ChildSpec, describe_end
from octavo.supervisor import Backoff, Supervisor

_TIMEOUT_S = 30.0


def _python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", textwrap.dedent(code)]


def _service(folder: Path, name: str, on_term: str = "") -> ChildSpec:
    """A process that notes its pid in a file when it is up and its end in another."""
    code = f"""
        import os, signal, sys, time
        def end(*_):
            with open({str(folder / "ends")!r}, "a") as file: file.write("{name} ")
            {on_term or "sys.exit(0)"}
        signal.signal(signal.SIGTERM, end)
        with open({str(folder / "starts")!r}, "a") as file: file.write("{name} ")
        print("hello from {name}")
        open({str(folder / name)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    return ChildSpec(name, _python(code), ready=(folder / name).exists, stop_timeout_s=5.0)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        await asyncio.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Run:
    """A supervisor running in this test's event loop."""

    def __init__(self, *specs: ChildSpec, backoff: Backoff | None = None) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            specs,
            show_line=lambda name, line: self.lines.append((name, line)),
            on_ready=self.ready.set,
            backoff=backoff or Backoff(first_s=0.01),
        )
        self.task = asyncio.create_task(self.supervisor.run())

    async def until_ready(self) -> None:
        ready = asyncio.create_task(self.ready.wait())
        await asyncio.wait([ready, self.task], timeout=_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        assert self.ready.is_set(), self.lines

    async def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(self.task, _TIMEOUT_S)


def test_starts_in_order_and_stops_in_reverse(tmp_path: Path) -> None:
    async def main() -> None:
        a, b, c = (_service(tmp_path, name) for name in "abc")
        b, c = (ChildSpec(s.name, s.command, ready=s.ready, needs=n) for s, n in ((b, ["a"]), (c, ["b"])))
        run = Run(a, b, c)
        await run.until_ready()
        pids = run.supervisor.pids()
        assert _words(tmp_path / "starts") == ["a", "b", "c"]
        assert await run.stop() == 0
        assert _words(tmp_path / "ends") == ["c", "b", "a"]
        assert all(_gone(pid) for pid in pids.values())
        assert ("b", "hello from b") in run.lines

    asyncio.run(main())


def test_a_dead_child_is_restarted_and_said_so(tmp_path: Path) -> None:
    async def main() -> None:
        run = Run(_service(tmp_path, "a"), _service(tmp_path, "b"))
        await run.until_ready()
        others = run.supervisor.pids()["a"]
        for _ in range(3):
            before = run.supervisor.pids()["b"]
            (tmp_path / "b").unlink()
            os.kill(before, signal.SIGKILL)
            await _until(lambda before=before: (tmp_path / "b").exists() and run.supervisor.pids()["b"] != before)
            await _until(lambda: run.lines[-1] == ("b", "is ready again"))
        assert run.supervisor.pids()["a"] == others
        said = [line for name, line in run.lines if name == "b" and "restarting" in line]
        assert said == [f"was ended by SIGKILL; restarting it in {d:g} s" for d in (0.01, 0.02, 0.04)]
        assert await run.stop() == 0

    asyncio.run(main())


def test_backoff_doubles_up_to_a_limit_and_is_forgotten(tmp_path: Path) -> None:
    backoff = Backoff(first_s=0.5, longest_s=30.0)
    assert [backoff.delay_s(n) for n in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.delay_s(10**6) == 30

    async def main() -> None:
        run = Run(_service(tmp_path, "a"), backoff=Backoff(first_s=0.01, forgotten_after_s=0.0))
        await run.until_ready()
        for _ in range(2):
            pid = run.supervisor.pids()["a"]
            os.kill(pid, signal.SIGKILL)
            await _until(lambda pid=pid: run.supervisor.pids().get("a") != pid)
        await _until(lambda: sum("restarting" in line for _, line in run.lines) == 2)
        assert [line for _, line in run.lines if "restarting" in line][1].endswith("in 0.01 s")
        assert await run.stop() == 0

    asyncio.run(main())


def test_a_child_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        bad = ChildSpec("b", _python("print('--port: no such port'); raise SystemExit(3)"), ready=lambda: False)
        run = Run(_service(tmp_path, "a"), bad)
        assert await asyncio.wait_for(run.task, _TIMEOUT_S) == 1
        assert not run.ready.is_set()
        assert ("b", "--port: no such port") in run.lines
        assert ("b", "ended with status 3; giving up") in run.lines
        assert run.supervisor.pids() == {}
        missing = Run(ChildSpec("x", ["/nonexistent/program"]))
        assert await asyncio.wait_for(missing.task, _TIMEOUT_S) == 1
        assert "cannot be started" in missing.lines[0][1]

    asyncio.run(main())


def test_a_child_that_is_never_ready_fails_the_start() -> None:
    async def main() -> None:
        run = Run(ChildSpec("a", _python("import time; time.sleep(60)"), ready=lambda: False, ready_timeout_s=0.3))
        assert await asyncio.wait_for(run.task, _TIMEOUT_S) == 1
        assert run.lines == [("a", "was not ready within 0.3 s; giving up")]

    asyncio.run(main())


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        stubborn = _service(tmp_path, "a", on_term="pass")
        run = Run(ChildSpec("a", stubborn.command, ready=stubborn.ready, stop_timeout_s=0.3))
        await run.until_ready()
        pid = run.supervisor.pids()["a"]
        assert await run.stop() == 0
        assert _gone(pid)
        assert run.lines[-1] == ("a", "did not stop within 0.3 s; killing it")

    asyncio.run(main())


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        stubborn = _service(tmp_path, "a", on_term="pass")
        run = Run(ChildSpec("a", stubborn.command, ready=stubborn.ready, stop_timeout_s=1e6))
        await run.until_ready()
        os.kill(os.getpid(), signal.SIGINT)
        await _until(lambda: _words(tmp_path / "ends") == ["a"])
        assert await run.stop() == 0

    asyncio.run(main())


def test_grandchildren_go_too(tmp_path: Path) -> None:
    async def main() -> None:
        code = f"""
            import subprocess, sys, time
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
            time.sleep(60)
        """
        ready = lambda: bool(_words(tmp_path / "pid"))  # noqa: E731
        run = Run(ChildSpec("a", _python(code), ready=ready))
        await run.until_ready()
        first = int(_words(tmp_path / "pid")[0])
        (tmp_path / "pid").unlink()
        os.kill(run.supervisor.pids()["a"], signal.SIGKILL)
        await _until(ready)
        await _until(lambda: _gone(first))
        second = int(_words(tmp_path / "pid")[0])
        assert await run.stop() == 0
        await _until(lambda: _gone(second))

    asyncio.run(main())


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
        import asyncio, sys
        from octavo.child import ChildSpec
        from octavo.supervisor import Supervisor
        async def main():
            spec = ChildSpec("a", [sys.executable, "-c", "import time; time.sleep(60)"])
            supervisor = Supervisor([spec], show_line=print,
                on_ready=lambda: open({str(tmp_path / "pid")!r}, "w").write(str(supervisor.pids()["a"])))
            await supervisor.run()
        asyncio.run(main())
    """
    parent = subprocess.Popen(_python(code))
    asyncio.run(_until(lambda: bool(_words(tmp_path / "pid"))))
    parent.kill()
    parent.wait()
    asyncio.run(_until(lambda: _gone(int(_words(tmp_path / "pid")[0]))))


def test_output_lines_of_any_length_and_shape() -> None:
    async def main() -> None:
        seen: list[str] = []

        def on_line(line: str) -> bool:
            seen.append(line)
            return line.startswith("hide")

        code = """
            import sys
            sys.stdout.buffer.write(b"x" * 200000 + b"\\nhide me\\n\\xff\\xfe\\r\\nlast")
            sys.stdout.flush()
            import time; time.sleep(60)
        """
        run = Run(ChildSpec("a", _python(code), on_line=on_line, ready=lambda: len(seen) >= 3))
        await run.until_ready()
        assert await run.stop() == 0
        assert seen == ["x" * 200000, "hide me", "\ufffd\ufffd", "last"]
        assert [line for _, line in run.lines] == [seen[0], seen[2], "last"]

    asyncio.run(main())


def test_a_quiet_child_speaks_only_when_it_dies(tmp_path: Path) -> None:
    async def main() -> None:
        loud = _service(tmp_path, "a")
        run = Run(ChildSpec("a", loud.command, ready=loud.ready, quiet=True))
        await run.until_ready()
        assert run.lines == []
        before = run.supervisor.pids()["a"]
        os.kill(before, signal.SIGKILL)
        await _until(lambda: run.supervisor.pids()["a"] != before)
        assert run.lines[:2] == [("a", "hello from a"), ("a", "was ended by SIGKILL; restarting it in 0.01 s")]
        assert await run.stop() == 0

    asyncio.run(main())


def test_needs_must_come_first() -> None:
    with pytest.raises(ValueError, match="a needs b, which does not come before it"):
        Supervisor([ChildSpec("a", [], needs=["b"]), ChildSpec("b", [])], show_line=lambda *_: None)


def test_ends_in_words() -> None:
    assert describe_end(3) == "ended with status 3"
    assert describe_end(-15) == "was ended by SIGTERM"
    assert describe_end(-250) == "was ended by signal 250"
