"""The embedded log server: both a server on PATH and the bundled one do everything the log needs."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from octavo.embedded_redis import EmbeddedRedis, EmbeddedRedisError, bundled_server, find_server, server_version
from octavo.instance import InstanceDir


def _on_path() -> Path | None:
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


@pytest.fixture(params=["bundled", "path"])
def server(request: pytest.FixtureRequest) -> Path:
    binary = bundled_server() if request.param == "bundled" else _on_path()
    if binary is None:
        assert request.param == "path", "the bundled server must be installed with the development extras"
        pytest.skip("no redis-server or valkey-server on PATH")
    return binary


@pytest.fixture(params=["unix", "tcp"])
def running(request: pytest.FixtureRequest, server: Path, home: Path) -> Iterator[EmbeddedRedis]:
    instance = InstanceDir()
    embedded = EmbeddedRedis(instance, server=server, tcp=request.param == "tcp")
    embedded.start()
    yield embedded
    embedded.stop()
    instance.remove()
    assert list((home / "run").iterdir()) == []


def test_streams_groups_and_scripts(running: EmbeddedRedis) -> None:
    with redis.Redis.from_url(running.url, protocol=3) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("appendonly")["appendonly"] == "yes"
        assert client.config_get("appendfsync")["appendfsync"] == "everysec"
        client.xgroup_create("s", "g", id="0", mkstream=True)
        first = client.xadd("s", {b"e": b"one"})
        second = client.xadd("s", {b"e": b"two"})
        read = client.xreadgroup("g", "dead", {"s": ">"}, count=10)
        entries = read[b"s"][0] if isinstance(read, dict) else read[0][1]
        assert [entry for entry, _ in entries] == [first, second]
        assert client.xack("s", "g", first) == 1
        claimed = client.xautoclaim("s", "g", "alive", min_idle_time=0)
        assert [entry for entry, _ in claimed[1]] == [second]
        script = "redis.call('XADD', KEYS[1], '*', 'e', ARGV[1]); return redis.call('XLEN', KEYS[1])"
        assert client.eval(script, 1, "s", "three") == 3
        code = "#!lua name=octavotest\nredis.register_function('twice', function(keys, args) return 2 * args[1] end)"
        client.function_load(code)
        assert client.fcall("twice", 0, 21) == 42


def test_strangers_are_kept_out(running: EmbeddedRedis, home: Path) -> None:
    (folder,) = (home / "run").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "redis.conf").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o600
    if running.url.startswith("redis://"):
        without_password = "redis://" + running.url.split("@")[1]
        with redis.Redis.from_url(without_password) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_a_killed_server_comes_back_with_its_data(server: Path, home: Path) -> None:
    instance = InstanceDir()
    embedded = EmbeddedRedis(instance, server=server)
    embedded.start()
    with redis.Redis.from_url(embedded.url) as client:
        client.xadd("s", {b"e": b"kept"})
        client.config_set("appendfsync", "always")  # flushes what everysec still holds back
        client.xadd("s", {b"e": b"too"})
    assert embedded._process is not None
    embedded._process.kill()
    embedded._process.wait()
    assert not embedded.ping()
    embedded.start()
    with redis.Redis.from_url(embedded.url) as client:
        assert client.xlen("s") == 2
    embedded.stop()
    instance.remove()


def test_it_writes_to_disk_as_often_as_it_is_told(server: Path, home: Path) -> None:
    instance = InstanceDir()
    embedded = EmbeddedRedis(instance, server=server, appendfsync="always")
    embedded.start()
    with redis.Redis.from_url(embedded.url) as client:
        assert client.config_get("appendfsync")["appendfsync"] == "always"
    embedded.stop()
    instance.remove()


def test_a_path_too_long_for_a_socket_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / ("long" * 40)))
    instance = InstanceDir()
    link = instance.socket_path("x.sock")
    assert len(str(link)) < 100
    embedded = EmbeddedRedis(instance, server=bundled_server())
    embedded.start()
    assert embedded.ping()
    embedded.stop()
    instance.remove()
    assert not instance.path.exists()
    assert not link.parent.parent.exists()


def test_the_server_dies_with_its_parent_and_the_next_run_cleans_up(home: Path) -> None:
    code = (
        "import time\n"
        "from octavo.embedded_redis import EmbeddedRedis\nfrom octavo.instance import InstanceDir\n"
        "embedded = EmbeddedRedis(InstanceDir()); embedded.start()\n"
        "print(embedded._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(list((home / "run").iterdir())) == 1  # nobody was left to remove it
    instance = InstanceDir()
    assert list((home / "run").iterdir()) == [instance.path]
    instance.remove()


def test_a_living_instance_is_not_swept(home: Path) -> None:
    first, second = InstanceDir(), InstanceDir()
    assert sorted((home / "run").iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def test_a_server_that_cannot_start_says_why(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho 'Bad directive'\nexit 1\n")
    broken.chmod(0o755)
    instance = InstanceDir()
    embedded = EmbeddedRedis(instance, server=broken)
    with pytest.raises(EmbeddedRedisError, match="did not start: Bad directive"):
        embedded.start()
    embedded.stop()
    instance.remove()


def test_path_comes_first_if_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == bundled_server()  # 6.0 is too old
    fake.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    assert find_server() == fake
    assert server_version(fake) == (7, 0)
    assert server_version(tmp_path / "missing") is None
