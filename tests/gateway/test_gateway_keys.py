"""Tenants and administrators: what a key stands for, where it never shows, and who may look into the cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from gateway_stage import Stage, default_reply

from octavo_gateway.keys import ANONYMOUS, KeyRing, is_local, tenant_of
from octavo_shared.entries import encode_request
from octavo_shared.settings import GatewaySettings, SettingError, load_settings

MakeStage = Callable[..., AbstractContextManager[Stage]]
ADMIN_ROUTES = [("GET", "/v1/kv"), ("POST", "/v1/cache/reset")]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_each_key_is_a_tenant_and_never_shows(make_stage: MakeStage, caplog: pytest.LogCaptureFixture) -> None:
    keys = ["sk-first-secret", "sk-second-secret"]
    with caplog.at_level(logging.DEBUG), make_stage(api_key=keys, admin_api_key=["sk-admin-secret"]) as stage:
        for key in (*keys, "sk-first-secret", "sk-admin-secret"):
            answer = stage.client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))
            assert answer.status_code == 200
            assert "secret" not in answer.text + str(answer.headers)
        first, second, again, admin = stage.engine.records
        tenants = [first.tenant, second.tenant, admin.tenant]
        assert tenants == [tenant_of(key) for key in (*keys, "sk-admin-secret")]
        assert again.tenant == first.tenant
        assert len(set(tenants)) == 3
        assert all(re.fullmatch("t-[0-9a-f]{16}", tenant) for tenant in tenants)
        assert all(b"secret" not in encode_request(record) for record in stage.engine.records)
        assert "secret" not in stage.client.get("/metrics").text
    assert "secret" not in caplog.text
    # How an operator finds out which tenant is whose.
    assert f"key 2 is tenant {tenant_of(keys[1])}" in caplog.text


def test_tenants_do_not_depend_on_the_process() -> None:
    assert tenant_of("key") == "t-4d9ff0fdcc93b3fb"


def test_without_keys_there_is_one_tenant(stage: Stage) -> None:
    for headers in ({}, bearer("whatever")):
        assert stage.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    assert [record.tenant for record in stage.engine.records] == [ANONYMOUS, ANONYMOUS]


@pytest.mark.parametrize("salt", [None, "s1"])
def test_the_salt_arrives(stage: Stage, salt: str | None) -> None:
    stage.post("/v1/completions", prompt="x", cache_salt=salt)
    stage.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], cache_salt=salt)
    assert [record.cache_salt for record in stage.engine.records] == [salt or ""] * 2


# --- administrators ---------------------------------------------------------------------------------------------------


def status(stage: Stage, method: str, path: str, headers: dict[str, str]) -> int:
    """Of an answer; 504 means that it was let through (nobody answers in these tests)."""
    answer = stage.client.request(method, path, headers=headers)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
    return answer.status_code


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_admin_keys_open_what_others_do_not(make_stage: MakeStage, method: str, path: str) -> None:
    strangers: list[dict[str, str]] = [{}, bearer("wrong"), {"Authorization": "root"}, {"Authorization": "Basic root"}]
    with make_stage(api_key=["one"], admin_api_key=["root", "boss"], admin_timeout_s=0.05) as stage:
        assert [status(stage, method, path, headers) for headers in strangers] == [401] * 4
        assert status(stage, method, path, bearer("one")) == 403
        assert [status(stage, method, path, bearer(key)) for key in ("root", "boss")] == [504, 504]
    with make_stage(admin_api_key=["root"], admin_timeout_s=0.05) as stage:
        assert [status(stage, method, path, headers) for headers in strangers] == [401] * 4
        assert status(stage, method, path, bearer("root")) == 504
        assert stage.post("/v1/completions", prompt="x").status_code == 200, "the API stays open"
    with make_stage(api_key=["one"], admin_timeout_s=0.05) as stage:
        assert status(stage, method, path, {}) == 401
        assert status(stage, method, path, bearer("one")) == 403
    with make_stage(admin_timeout_s=0.05) as stage:
        assert status(stage, method, path, {}) == 504
        assert status(stage, method, path, {"X-Forwarded-For": "192.0.2.7"}) == 403
        assert status(stage, method, path, {"Host": "attacker.example"}) == 403
        assert status(stage, method, path, {"Origin": "http://attacker.example"}) == 403


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("::1", {"host": "[::1]:8000"}, True),
        ("127.0.0.1", {"host": "127.0.0.1"}, True),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "http://localhost:3000"}, True),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "null"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1.attacker.example"}, False),
        ("127.0.0.1", {"host": "octavo.example"}, False),
        ("127.0.0.1", {}, False),
        ("192.0.2.7", {"host": "localhost"}, False),
        ("::ffff:192.0.2.7", {"host": "localhost"}, False),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=192.0.2.7"}, False),
        ("127.0.0.1", {"host": "localhost", "via": "1.1 proxy"}, False),
        ("127.0.0.1", {"host": "localhost", "x-real-ip": "192.0.2.7"}, False),
        (None, {"host": "localhost"}, False),
    ],
)
def test_who_is_on_this_machine(client: str | None, headers: dict[str, str], local: bool) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "client": None if client is None else (client, 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    assert is_local(scope) is local


def test_an_admin_key_that_everyone_has_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--admin-api-key \(OCTAVO_ADMIN_API_KEY\).*API key as well"):
        load_settings(GatewaySettings, api_key="a,b", admin_api_key="c,b")
    with pytest.raises(SettingError, match="must not be blank"):
        load_settings(GatewaySettings, admin_api_key=["c", " "])


def test_keys_are_told_apart_whatever_bytes_come() -> None:
    ring = KeyRing(["one", "ключ"], [])

    def caller(header: bytes) -> str:
        return ring.caller({"type": "http", "headers": [(b"authorization", header)]}).tenant

    assert caller(b"Bearer one") == caller(b"bearer  one ") == tenant_of("one")
    assert caller("Bearer ключ".encode()) == tenant_of("ключ")
    assert caller(b"Bearer \xff\xfe") == caller(b"Bearer") == caller(b"Bearer ones") == ANONYMOUS


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start": "-1"}, "start"),
        ({"start": "x"}, "start"),
        ({"start": "9" * 30}, "start"),
        ({"limit": "16385"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"limit": "1.5"}, "limit"),
    ],
)
def test_bad_pages_are_400(stage: Stage, query: dict[str, str], param: str) -> None:
    answer = stage.client.get("/v1/kv", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_no_scheduler_is_503_and_a_silent_one_504(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_gateway import limits as limits_module

    with make_stage(admin_timeout_s=0.05) as stage:
        answer = stage.client.get("/v1/kv")
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "GatewayTimeoutError")
        assert answer.json()["error"]["message"] == "The scheduler did not answer within 0.05 s."
        monkeypatch.setattr(limits_module, "FRESH_S", 0.0)
        answer = stage.client.get("/v1/kv")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "silent" in answer.json()["error"]["message"]


def test_ordinary_routes_do_not_need_an_administrator(make_stage: MakeStage) -> None:
    with make_stage(admin_api_key=["root"]) as stage:
        stage.engine.reply = default_reply
        for path in ("/health", "/metrics", "/v1/models", "/openapi.json"):
            assert httpx.get(stage.url.rstrip("/") + path).status_code == 200
