"""Keys from a file: tenants, ceilings, weights, and rates that all gateways count together."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import Reply, Stage, eventually, open_stage

from octavo_gateway.keys import KeyRing
from octavo_shared.keyfile import KeyRecord, digest_of, table_text
from octavo_shared.settings import SettingError

MakeStage = Callable[..., AbstractContextManager[Stage]]


def record(key: str, tenant: str = "acme", **fields: Any) -> KeyRecord:
    return KeyRecord(tenant, digest_of(key.encode()), **fields)


def write(path: Path, *records: KeyRecord) -> str:
    beside = path.with_suffix(".new")
    beside.write_text("\n".join(map(table_text, records)))
    os.replace(beside, path)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(stage: Stage, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    if path == "/v1/completions":
        body = {"prompt": [5] * 10, "max_tokens": 10, **body}
    return stage.client.post(path, json=body, headers=bearer(key))


def test_records_are_tenants(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.toml",
        record("k1", priority_ceiling=5, weight=2.5),
        record("k2", weight=2.5),
        record("k3", "boss", admin=True),
    )
    with make_stage(api_key_file=path, api_key=["plain"], admin_timeout_s=0.05) as stage:
        for key in ("k1", "k2", "k3", "plain"):
            answer = ask(stage, key, priority=-7)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if "ratelimit" in name], "it has no rates"
        ask(stage, "k1", priority=9)
        ask(stage, "k1")
        assert [one.tenant for one in stage.engine.records][:3] == ["acme", "acme", "boss"]
        assert [one.priority for one in stage.engine.records] == [5, -7, -7, -7, 9, 5]
        assert [one.tenant_weight for one in stage.engine.records][:4] == [2.5, 2.5, 0.0, 0.0]
        for key in ("x", "k4", digest_of(b"k1"), "K1"):
            assert ask(stage, key).status_code == 401
        # 504: it was let through, and nobody answers here.
        assert stage.client.get("/v1/kv", headers=bearer("k3")).status_code == 504
        assert stage.client.get("/v1/kv", headers=bearer("k1")).status_code == 403


def test_requests_per_minute(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", requests_per_minute=3), record("other", "b"))
    with make_stage(api_key_file=path) as stage:
        answers = [ask(stage, "k", stream=stream) for stream in (False, True, False)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
        assert re.fullmatch(r"(1m0s|59(\.\d)?s)", answers[2].headers["x-ratelimit-reset-requests"])
        assert "x-ratelimit-limit-tokens" not in answers[0].headers
        refused = ask(stage, "k")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["message"].startswith("Rate limit reached for requests per minute: limit 3,")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(stage.engine.records) == 3, "nothing of it was queued"
        assert ask(stage, "other").status_code == 200
        # What is wrong costs nothing, and neither do other routes.
        assert ask(stage, "k", temperature=9).status_code == 400
        assert stage.client.get("/v1/models", headers=bearer("k")).status_code == 200
        assert "octavo:requests_rate_limited_total 1.0" in stage.client.get("/metrics").text


def test_tokens_per_minute_are_estimated_then_counted(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", tokens_per_minute=100))

    def left(stage: Stage) -> int:
        return int(ask(stage, "k", max_tokens=1, prompt=[5]).headers["x-ratelimit-remaining-tokens"])

    with make_stage(api_key_file=path) as stage:
        # It may make 60 tokens and makes 10: with the 10 of its prompt that is 20.
        stage.engine.reply = lambda one, choice: Reply([7] * min(10, one.sampling.max_tokens))
        first = ask(stage, "k", max_tokens=60)
        assert first.headers["x-ratelimit-remaining-tokens"] == "30"
        eventually(lambda: left(stage) >= 70, "what it did not need comes back")
        # More than there is, but not more than a full bucket.
        refused = ask(stage, "k", prompt=[5] * 80, max_tokens=20)
        assert refused.status_code == 429
        assert "tokens per minute: limit 100" in refused.json()["error"]["message"]
        assert "about 100" in refused.json()["error"]["message"]


def test_what_is_cut_short_costs_what_was_made(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", tokens_per_minute=10_000))
    gate = threading.Event()
    with make_stage(api_key_file=path) as stage:
        stage.engine.reply = lambda one, choice: Reply([504] * 200, gate=gate, before_gate=3)
        body = {"prompt": [5] * 10, "max_tokens": 200, "stream": True}
        with stage.client.stream("POST", "/v1/completions", json=body, headers=bearer("k")) as answer:
            assert answer.headers["x-ratelimit-remaining-tokens"] == "9790"
            next(answer.iter_lines())
        gate.set()
        stage.engine.reply = lambda one, choice: Reply([7])

        def left() -> int:
            return int(ask(stage, "k", prompt=[5], max_tokens=1).headers["x-ratelimit-remaining-tokens"])

        eventually(lambda: left() > 9900, "the client has gone; what it did not get comes back")


def test_gateways_share_a_key(redis_url: str, tokenizer: object, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", requests_per_minute=4))
    with (
        open_stage(redis_url, "shared-rates", api_key_file=path) as one,
        open_stage(redis_url, "shared-rates", api_key_file=path) as two,
    ):
        # Each stage has an engine; together they are the scheduler's consumer group.
        statuses = [ask(stage, "k").status_code for stage in (one, two, two, one, two, one)]
    assert statuses == [200] * 4 + [429] * 2


def test_an_overloaded_server_costs_nothing(make_stage: MakeStage, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", record("k", requests_per_minute=5))
    with make_stage(api_key_file=path) as stage:
        limits = stage.engine.limits
        stage.engine.limits = replace(limits, queued_tokens=1000, max_queued_tokens=1000)
        heard = lambda: stage.server.gateway.limits.latest.queued_tokens == 1000  # noqa: E731
        eventually(heard, "the gateway hears of it")
        for _ in range(7):
            assert "overloaded" in ask(stage, "k").json()["error"]["message"]
        stage.engine.limits = limits
        eventually(lambda: ask(stage, "k").status_code == 200, "it is over")


def test_a_changed_file_is_read_again(make_stage: MakeStage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    with make_stage(api_key_file=write(path, record("old"))) as stage:
        assert ask(stage, "old").status_code == 200
        write(path, record("new", "beta"))
        eventually(lambda: ask(stage, "new").status_code == 200, "the new key is known")
        assert ask(stage, "old").status_code == 401
        assert stage.engine.records[-1].tenant == "beta"
        path.write_text("nonsense")
        eventually(lambda: "stay as they are" in caplog.text, "the fault is said")
        assert ask(stage, "new").status_code == 200
        path.unlink()
        eventually(lambda: "cannot be read" in caplog.text, "the loss is said")
        assert ask(stage, "new").status_code == 200
        write(path)
        eventually(lambda: ask(stage, "new").status_code == 401, "no key, nobody comes in")


def test_a_reload_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    ring = KeyRing([], [], Path(write(path, record("a"))))
    assert not ring.reload()
    assert ring.reload(force=True)
    write(path, record("b", "x"), record("c", "y"))
    assert ring.reload()
    assert ring.tenants == ["x", "y"]


def test_a_bad_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(SettingError, match=r"--api-key-file \(OCTAVO_API_KEY_FILE\): .* cannot be read"):
        KeyRing([], [], path)
    write(path, record("a"))
    with pytest.raises(SettingError, match="given as a setting as well"):
        KeyRing(["a"], [], path)
