"""HTTPS: with certificates of the server, and of clients where they are asked for."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import Stage

from octavo.main import main
from octavo_shared.settings import GatewaySettings, SettingError, load_settings
from octavo_shared.tls import https_requirement

MakeStage = Callable[..., AbstractContextManager[Stage]]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    return folder


def trusting(certs: Path, own: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    if own:
        context.load_cert_chain(certs / f"{own}.pem", certs / f"{own}-key.pem")
    return context


def flags(certs: Path) -> dict[str, Any]:
    return {"ssl_certfile": str(certs / "gateway.pem"), "ssl_keyfile": str(certs / "gateway-key.pem")}


def test_https(make_stage: MakeStage, certs: Path) -> None:
    with make_stage(tls=trusting(certs), **flags(certs)) as stage:
        assert stage.url.startswith("https://")
        assert len(stage.stream("/v1/completions", prompt="one two three", max_tokens=5)) > 1
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{stage.url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{stage.url}/health".replace("https", "http"))


def test_clients_need_certificates_where_authorities_are_named(make_stage: MakeStage, certs: Path) -> None:
    with make_stage(tls=trusting(certs, "executor"), **flags(certs), ssl_ca_certs=str(certs / "ca.pem")) as stage:
        assert stage.post("/v1/completions", prompt="x").status_code == 200
        with pytest.raises(httpx.TransportError), httpx.Client(verify=trusting(certs)) as stranger:
            stranger.get(f"{stage.url}/health")
        assert stage.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ssl_keyfile": None}, r"--ssl-keyfile \(OCTAVO_SSL_KEYFILE\): key and certificate go together"),
        ({"ssl_certfile": None}, "--ssl-certfile"),
        ({"ssl_certfile": "executor.pem"}, "cannot be used together"),
        ({"ssl_certfile": "no.pem"}, "No such file"),
        ({"ssl_ca_certs": "gateway-key.pem"}, "--ssl-ca-certs"),
        ({"ssl_ca_certs": "ca.pem", "ssl_keyfile": None, "ssl_certfile": None}, "needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs"),
    ],
)
def test_what_does_not_fit_stops_the_start(certs: Path, change: dict[str, Any], said: str) -> None:
    change = {name: str(certs / value) if isinstance(value, str) else value for name, value in change.items()}
    with pytest.raises(SettingError, match=said):
        https_requirement(load_settings(GatewaySettings, **flags(certs) | change))


def test_whether_clients_need_certificates(certs: Path) -> None:
    def required(**more: Any) -> int:
        return https_requirement(load_settings(GatewaySettings, **flags(certs), **more))

    authority = str(certs / "ca.pem")
    assert [required(), required(ssl_ca_certs=authority)] == [0, 2]
    assert [required(ssl_ca_certs=authority, ssl_cert_reqs=wanted) for wanted in (0, 1, 2)] == [0, 1, 2]
