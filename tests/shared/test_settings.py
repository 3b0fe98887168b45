"""Settings: a flag wins over the environment, the environment over the default, and a bad value is named."""

from __future__ import annotations

from decimal import Decimal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo_shared.settings import (
    CommonSettings,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    SettingError,
    load_settings,
    parse_count,
    split_list,
)

KINDS: list[type[CommonSettings]] = [GatewaySettings, SchedulerSettings, ExecutorSettings]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_valid_and_described(kind: type[CommonSettings]) -> None:
    load_settings(kind)
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["group"], name


def test_flag_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(GatewaySettings).port == 8000
    monkeypatch.setenv("OCTAVO_PORT", "9001")
    assert load_settings(GatewaySettings).port == 9001
    assert load_settings(GatewaySettings, port=9002).port == 9002
    assert load_settings(GatewaySettings, port="9003").port == 9003
    # A flag that was not given does not hide the environment; one that is false or zero was given.
    assert load_settings(GatewaySettings, port=None).port == 9001
    assert load_settings(GatewaySettings, port=0).port == 0
    monkeypatch.setenv("OCTAVO_ENABLE_PREFIX_CACHING", "true")
    assert load_settings(SchedulerSettings, enable_prefix_caching=False).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4k", 4000),
        ("4K", 4096),
        ("2m", 2 * 10**6),
        ("2M", 2 * 2**20),
        ("1g", 10**9),
        ("1G", 2**30),
        ("1t", 10**12),
        ("3T", 3 * 2**40),
        ("1.5k", 1500),
        ("1.5K", 1536),
        ("1.001k", 1001),
        ("4.35k", 4350),
        ("16GiB", 16 * 2**30),
        ("4kB", 4000),
        (" 8k ", 8000),
        ("77", 77),
        (77, 77),
    ],
)
def test_counts_with_suffixes(monkeypatch: pytest.MonkeyPatch, text: object, value: int) -> None:
    assert load_settings(ExecutorSettings, kv_cache_memory_bytes=text).kv_cache_memory_bytes == value
    monkeypatch.setenv("OCTAVO_KV_CACHE_MEMORY_BYTES", str(text))
    assert load_settings(ExecutorSettings).kv_cache_memory_bytes == value


@given(st.decimals(0, 10**6, places=3), st.sampled_from([("k", 1000), ("m", 10**6), ("K", 1024)]))
def test_counts_are_exact(number: Decimal, suffix: tuple[str, int]) -> None:
    assert parse_count(f"{number}{suffix[0]}") == int(number * suffix[1])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GatewaySettings, "port", "http"),
        (GatewaySettings, "port", "65536"),
        (GatewaySettings, "port", "-1"),
        (GatewaySettings, "port", ""),
        (GatewaySettings, "max_request_body_bytes", "4x"),
        (GatewaySettings, "max_logprobs", "-2"),
        (GatewaySettings, "error_code_style", "both"),
        (GatewaySettings, "gateway_lease_s", "0"),
        (GatewaySettings, "gateway_lease_s", "inf"),
        (GatewaySettings, "gateway_lease_s", "1e300"),
        (SchedulerSettings, "scheduler_lease_s", "0.0001"),
        (SchedulerSettings, "executor_lease_s", "nan"),
        (GatewaySettings, "api_key", ""),
        (GatewaySettings, "api_key", " , "),
        (GatewaySettings, "admin_api_key", ""),
        (GatewaySettings, "api_key_file", ""),
        (GatewaySettings, "ssl_certfile", ""),
        (GatewaySettings, "ssl_ca_certs", " "),
        (SchedulerSettings, "executor_secret", ""),
        (ExecutorSettings, "grpc_ssl_ca_certs", ""),
        (SchedulerSettings, "scheduling_policy", "fairly"),
        (SchedulerSettings, "prefix_cache_scope", "user"),
        (SchedulerSettings, "max_num_partial_prefills", "-1"),
        (SchedulerSettings, "max_queued_tokens", "-1"),
        (SchedulerSettings, "tenant_weights", "a"),
        (SchedulerSettings, "tenant_weights", "=2"),
        (SchedulerSettings, "tenant_weights", "a=two"),
        (SchedulerSettings, "tenant_weights", "a=0"),
        (SchedulerSettings, "tenant_weights", "a=-1"),
        (SchedulerSettings, "tenant_weights", "a=inf"),
        (SchedulerSettings, "tenant_weights", "a=1,a=2"),
        (GatewaySettings, "admin_timeout_s", "0"),
        (SchedulerSettings, "enable_prefix_caching", "perhaps"),
        (SchedulerSettings, "max_num_seqs", "0"),
        (SchedulerSettings, "log_level", "loud"),
        (ExecutorSettings, "gpu_memory_utilization", "1.5"),
        (ExecutorSettings, "block_size", "257"),
        (ExecutorSettings, "dtype", "int4"),
        (ExecutorSettings, "max_model_len", "k"),
        (ExecutorSettings, "max_model_len", "1.5"),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: type[CommonSettings], name: str, value: str
) -> None:
    flag, variable = "--" + name.replace("_", "-"), "OCTAVO_" + name.upper()
    with pytest.raises(SettingError) as by_flag:
        load_settings(kind, **{name: value})
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError) as by_environment:
        load_settings(kind)
    for error in (by_flag, by_environment):
        assert flag in str(error.value)
        assert variable in str(error.value)


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(SettingError) as error:
        load_settings(GatewaySettings, port="x", max_n="0")
    assert "--port" in str(error.value)
    assert "--max-n" in str(error.value)


def test_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(GatewaySettings).api_key == []
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two,,")
    assert load_settings(GatewaySettings).api_key == ["one", "two"]
    assert load_settings(GatewaySettings, api_key=["three"]).api_key == ["three"]
    assert load_settings(GatewaySettings, api_key=["three,four", "five"]).api_key == ["three", "four", "five"]
    with pytest.raises(SettingError, match="must not be blank"):
        load_settings(GatewaySettings, api_key=["three", ","])
    assert split_list("") == []


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("/models/small", [], "small"),
        ("org/small", [], "small"),
        ("/models/small/", [], "small"),
        ("x", ["a", "b"], "a"),
    ],
)
def test_model_name(model: str, served: list[str], name: str) -> None:
    assert load_settings(CommonSettings, model=model, served_model_name=served).model_name == name


def test_settings_do_not_change() -> None:
    settings = load_settings(GatewaySettings)
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("", {}),
        ("t-12=2", {"t-12": 2.0}),
        (" t-12 = 2 , anonymous=0.5,", {"t-12": 2.0, "anonymous": 0.5}),
        ("a=b=3", {"a=b": 3.0}),
        ({"a": 1}, {"a": 1.0}),
    ],
)
def test_weights(monkeypatch: pytest.MonkeyPatch, text: object, weights: dict[str, float]) -> None:
    assert load_settings(SchedulerSettings, tenant_weights=text).tenant_weights == weights
    if isinstance(text, str):
        monkeypatch.setenv("OCTAVO_TENANT_WEIGHTS", text)
        assert load_settings(SchedulerSettings).tenant_weights == weights


def test_an_admin_key_must_not_be_an_api_key() -> None:
    with pytest.raises(SettingError, match=r"--admin-api-key \(OCTAVO_ADMIN_API_KEY\).*API key as well"):
        load_settings(GatewaySettings, api_key="a,b", admin_api_key="b")
    assert load_settings(GatewaySettings, api_key="a", admin_api_key="b,c").admin_api_key == ["b", "c"]


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_models_is_refused_by_name(kind: type[CommonSettings]) -> None:
    load_settings(kind, trust_remote_code=False)
    with pytest.raises(SettingError, match=r"--trust-remote-code .*never runs code"):
        load_settings(kind, trust_remote_code="true")
