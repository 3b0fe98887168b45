"""`octavo certs`: certificates that both sides of a mutual line accept, and nobody else's."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from octavo.certs import SERVICES
from octavo.main import main


def handshake(folder: Path, authority: Path, server: str, client: str, name: str) -> None:
    """Two ends in memory. Raises ssl.SSLError when one does not accept the other."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / f"{server}.pem", folder / f"{server}-key.pem")
    serving.load_verify_locations(authority)
    serving.verify_mode = ssl.CERT_REQUIRED
    asking = ssl.create_default_context(cafile=str(authority))
    asking.load_cert_chain(folder / f"{client}.pem", folder / f"{client}-key.pem")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        asking.wrap_bio(to_client, to_server, server_hostname=name),
        serving.wrap_bio(to_server, to_client, server_side=True),
    ]
    done: set[int] = set()
    for _ in range(10):
        for place, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(place)
            except ssl.SSLWantReadError:
                pass
    assert done == {0, 1}
    # With TLS 1.3 a client learns only now that it was not accepted.
    ends[1].write(b"x")
    assert ends[0].read(1) == b"x"


def test_both_sides_accept_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--host", "api.example", "--host", "192.0.2.7"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    for service in SERVICES:
        for name in ("localhost", "127.0.0.1", "::1", "scheduler", "api.example", "192.0.2.7"):
            handshake(folder, folder / "ca.pem", service, "executor", name)
    with pytest.raises(ssl.SSLError, match=r"mismatch|doesn't match"):
        handshake(folder, folder / "ca.pem", "gateway", "executor", "other.example")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*-key.pem")} == {0o600}


def test_an_authority_is_kept_and_a_stranger_is_not_accepted(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["certs", str(ours)]) == 0
    before = {path.name: path.read_bytes() for path in ours.iterdir()}
    assert main(["certs", str(ours), "--days", "10"]) == 0
    after = {path.name: path.read_bytes() for path in ours.iterdir()}
    assert {name for name in before if before[name] == after[name]} == {"ca.pem", "ca-key.pem"}
    handshake(ours, ours / "ca.pem", "scheduler", "executor", "localhost")
    assert main(["certs", str(theirs)]) == 0
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(theirs, ours / "ca.pem", "scheduler", "executor", "localhost")


@pytest.mark.parametrize(
    ("words", "said"), [(["--days", "0"], "--days must be"), (["--host", "ü"], "--host: 'ü' is neither")]
)
def test_what_is_wrong_is_said(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path / "c"), *words]) == 1
    assert said in capsys.readouterr().err


def test_an_authority_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    assert main(["certs", str(tmp_path)]) == 1
    assert "cannot be used" in capsys.readouterr().err
