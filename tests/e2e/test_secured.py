"""Everything locked at once, with real processes: TLS and users on Redis, mutual TLS and a secret on gRPC, HTTPS and a key file
on the API. It answers, strangers do not get in, and no prompt, output, key or password shows in any log line or span."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis
from e2e_stack import Stack
from redis.exceptions import NoPermissionError
from test_traces import Receiver

from octavo.main import main

PASSWORD = "redis-password-7431"
SECRET = "executor-secret-5519"
# Words that stand in nothing else.
PROMPT, SYSTEM, STOP, SALT, LABEL = (
    "zebra quartz umbrella",
    "walrus tangerine",
    "xylophone9",
    "salty-salt-88",
    "user-label-77",
)

# What a service does with Redis: see docs/security.md, where operators take it from.
ACL = (
    f"user octavo on >{PASSWORD} resetkeys ~octavo:* resetchannels -@all +@read +@write +@stream +@scripting +@transaction "
    "+@connection +@blocking -@dangerous +info +time"
)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def secured_redis(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that only speaks TLS, only with certificates of the authority, and knows one user."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("the bundled Valkey has no TLS, and there is no redis-server on PATH")
    folder = tmp_path_factory.mktemp("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = [
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\nsave ''\nmaxmemory-policy noeviction",
        f"tls-cert-file {certs}/redis.pem\ntls-key-file {certs}/redis-key.pem\ntls-ca-cert-file {certs}/ca.pem",
        f"user default off\n{ACL}",
    ]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([binary, str(folder / "redis.conf")], stdout=subprocess.DEVNULL)
    tls = f"ssl_ca_certs={certs}/ca.pem&ssl_certfile={certs}/executor.pem&ssl_keyfile={certs}/executor-key.pem"
    url = f"rediss://octavo:{PASSWORD}@localhost:{port}/0?{tls}"
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis.from_url(url) as client:
                    client.ping()
                break
            except redis.RedisError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def test_locked_and_silent(
    start_small: Callable[..., Stack],
    secured_redis: str,
    certs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", str(tmp_path / "keys.toml"), "acme", "--requests-per-minute", "1000"]) == 0
    assert main(["keys", str(tmp_path / "keys.toml"), "ops", "--admin"]) == 0
    key, admin = capsys.readouterr().out.split()
    receiver = Receiver()
    stack = start_small(
        *("--scheduler-address", f"unix:{tmp_path}/scheduler.sock", "--log-level", "debug"),
        *("--ssl-certfile", f"{certs}/gateway.pem", "--ssl-keyfile", f"{certs}/gateway-key.pem"),
        *("--grpc-ssl-certfile", f"{certs}/executor.pem", "--grpc-ssl-keyfile", f"{certs}/executor-key.pem"),
        *("--grpc-ssl-ca-certs", f"{certs}/ca.pem", "--api-key-file", str(tmp_path / "keys.toml")),
        *("--otlp-traces-endpoint", f"http://127.0.0.1:{receiver.port}"),
        environment={"OCTAVO_REDIS_URL": secured_redis, "OCTAVO_EXECUTOR_SECRET": SECRET},
    )
    assert stack.url.startswith("https://")
    outputs = []
    with httpx.Client(
        base_url=stack.url, verify=ssl.create_default_context(cafile=str(certs / "ca.pem")), timeout=60
    ) as client:
        assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer wrong-key-123"}).status_code == 401
        client.headers["Authorization"] = f"Bearer {key}"
        more = {
            "max_tokens": 30,
            "stop": [STOP],
            "cache_salt": SALT,
            "user": LABEL,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(2):
            answer = client.post("/v1/completions", json={"prompt": PROMPT, "logprobs": 2, **more}).raise_for_status()
            outputs.append(answer.json()["choices"][0]["text"])
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
        with client.stream(
            "POST", "/v1/chat/completions", json={"messages": messages, "stream": True, **more}
        ) as lines:
            assert sum(line.startswith("data: ") for line in lines.iter_lines()) > 2
        # What is refused, in every way a request can be, is not repeated in a log either.
        bad = [
            {"prompt": PROMPT, "n": -1},
            {"prompt": [PROMPT, 1]},
            {"prompt": PROMPT * 5000},
            {"prompt": {"a": PROMPT}},
        ]
        for body in bad:
            assert client.post("/v1/completions", json=body).status_code == 400
        broken = client.post("/v1/completions", content=f'{{"prompt": "{PROMPT}"'.encode())
        assert broken.status_code == 400
        assert client.get("/v1/kv").status_code == 403
        assert client.get("/v1/kv", headers={"Authorization": f"Bearer {admin}"}).status_code == 200
        metrics = client.get("/metrics").text
    assert stack.stop() == 0
    log = "\n".join(stack.lines)
    assert "DEBUG" in log, "the level was lowered"
    receiver.server.stop(1).wait(5)
    spans = str(receiver.spans)
    assert "POST /v1/completions" in spans
    assert "gen_ai.usage.input_tokens" in spans
    secrets = [key, admin, "wrong-key-123", PASSWORD, SECRET, *PROMPT.split(), *SYSTEM.split(), STOP, SALT, LABEL]
    secrets += [text for text in outputs if len(text) > 8]
    for name, text in (("log", log), ("spans", spans), ("metrics", metrics)):
        assert not [secret for secret in secrets if secret in text], f"shown in the {name}"


def test_the_manual_names_the_same_user() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert ACL.replace(PASSWORD, "PASSWORD") in manual


def test_redis_lets_no_stranger_in(secured_redis: str) -> None:
    for url in (secured_redis.replace(PASSWORD, "wrong"), secured_redis.replace("octavo:" + PASSWORD + "@", "")):
        with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
    with redis.Redis.from_url(secured_redis) as client:
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("GET", "other"), ("KEYS", "*"), ("ACL", "LIST")):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
    plain = secured_redis.replace("rediss://", "redis://").partition("?")[0]
    with redis.Redis.from_url(plain) as client, pytest.raises(redis.ConnectionError):
        client.ping()
