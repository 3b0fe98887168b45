"""Who may attach: executors that know the secret, and where TLS is mutual have a certificate. Both ends are the real ones."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_stage import MODEL, Stage, play

from octavo.main import main
from octavo_executor.session import RefusedError, Session
from octavo_shared.plan import ExecutorInfo
from octavo_shared.settings import ExecutorSettings, SchedulerSettings, SettingError, load_settings
from octavo_shared.tls import channel_credentials, leaves_machine, metadata_of, server_credentials
from octavo_shared.wire import Welcome

SECRET = "a secret of more than 16 letters"
INFO = ExecutorInfo("e0", "e0-1", MODEL, "f", 16, 16, 128, 8, 64, 1000)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    return folder


def tls(certs: Path, who: str, *, own: bool = True, authority: str = "ca") -> dict[str, Any]:
    flags = {"grpc_ssl_ca_certs": str(certs / f"{authority}.pem")} if authority else {}
    if own:
        flags |= {
            "grpc_ssl_certfile": str(certs / f"{who}.pem"),
            "grpc_ssl_keyfile": str(certs / f"{who}-key.pem"),
        }
    return flags


def attach(address: str, **flags: Any) -> Session:
    settings = load_settings(ExecutorSettings, scheduler_address=address, **flags)
    return Session([address], INFO, credentials=channel_credentials(settings), metadata=metadata_of(settings))


async def outcome(session: Session, timeout_s: float = 5.0) -> str:
    """What an executor hears first; "silence" when nothing comes."""
    waiting = asyncio.create_task(asyncio.to_thread(session.receive))
    try:
        done, _ = await asyncio.wait([waiting], timeout=timeout_s)
        if not done:
            return "silence"
        return "welcome" if isinstance(waiting.result()[1], Welcome) else "other"
    except RefusedError as error:
        return f"refused: {error}"
    finally:
        session.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(session.join)


def test_the_secret(valkey: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await stage.listening()
        for wrong in ({}, {"executor_secret": SECRET + "x"}, {"executor_secret": SECRET[:-1]}):
            said = await outcome(attach(stage.address, **wrong))
            assert said == "refused: the executors' secret is missing or wrong"
        assert not stage.service.engines
        assert await outcome(attach(stage.address, executor_secret=SECRET)) == "welcome"

    with caplog.at_level(logging.DEBUG):
        play(scene, valkey, tmp_path, executor_secret=SECRET)
    assert "does not know the executors' secret" in caplog.text
    assert SECRET not in caplog.text


def test_without_a_secret_one_that_is_shown_does_no_harm(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert await outcome(attach(stage.address, executor_secret=SECRET)) == "welcome"

    play(scene, valkey, tmp_path)


def test_a_stranger_is_turned_away_before_it_is_listened_to(valkey: str, tmp_path: Path) -> None:
    """However much it sends, none of it is read into memory."""

    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with grpc.aio.insecure_channel(stage.address) as channel:
            call = channel.stream_stream("/octavo.v1.Scheduler/Attach")(metadata=(("x-octavo-executor-secret", "x"),))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

    play(scene, valkey, tmp_path, executor_secret=SECRET)


def test_mutual_tls(valkey: str, tmp_path: Path, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    foreign = tmp_path_factory.mktemp("foreign")
    assert main(["certs", str(foreign)]) == 0

    async def scene(stage: Stage) -> None:
        await stage.listening()
        good = attach(stage.address, **tls(certs, "executor"))
        assert await outcome(good) == "welcome"
        strangers = {
            "no certificate": tls(certs, "executor", own=False),
            "one of another authority": tls(foreign, "executor") | {"grpc_ssl_ca_certs": str(certs / "ca.pem")},
            "plain text": {},
            "does not trust the scheduler": tls(certs, "executor") | {"grpc_ssl_ca_certs": str(foreign / "ca.pem")},
        }
        sessions = {name: attach(stage.address, **flags) for name, flags in strangers.items()}
        said = await asyncio.gather(*(outcome(session, 1.5) for session in sessions.values()))
        assert dict(zip(sessions, said, strict=True)) == dict.fromkeys(strangers, "silence")
        assert not stage.service.engines

    play(scene, valkey, tmp_path, **tls(certs, "scheduler"))


def test_tls_of_the_scheduler_alone_with_a_secret(valkey: str, tmp_path: Path, certs: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.listening()
        trusting = tls(certs, "executor", own=False)
        assert (await outcome(attach(stage.address, **trusting))).startswith("refused")
        assert await outcome(attach(stage.address, **trusting, executor_secret=SECRET)) == "welcome"

    play(scene, valkey, tmp_path, **tls(certs, "scheduler", authority=""), executor_secret=SECRET)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"grpc_ssl_keyfile": "scheduler-key.pem"}, "--grpc-ssl-certfile"),
        ({"grpc_ssl_certfile": "scheduler.pem"}, "--grpc-ssl-keyfile"),
        ({"grpc_ssl_ca_certs": "ca.pem"}, "needs --grpc-ssl-certfile"),
        ({"grpc_ssl_certfile": "scheduler.pem", "grpc_ssl_keyfile": "executor-key.pem"}, "cannot be used together"),
        ({"grpc_ssl_certfile": "no.pem", "grpc_ssl_keyfile": "executor-key.pem"}, "No such file"),
    ],
)
def test_files_that_do_not_fit_stop_the_start(certs: Path, flags: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        server_credentials(
            load_settings(SchedulerSettings, **{name: str(certs / file) for name, file in flags.items()})
        )


def test_an_executor_needs_authorities(certs: Path) -> None:
    with pytest.raises(SettingError, match="needs --grpc-ssl-ca-certs"):
        channel_credentials(load_settings(ExecutorSettings, **tls(certs, "executor", authority="")))


@pytest.mark.parametrize(
    "secret", ["short", " leading blanks are lost", "non-ascii: schlüssel schlüssel", "line\nbreaks are no good"]
)
def test_bad_secrets(secret: str) -> None:
    with pytest.raises(SettingError, match=r"--executor-secret \(OCTAVO_EXECUTOR_SECRET\)") as error:
        load_settings(SchedulerSettings, executor_secret=secret)
    assert secret not in str(error.value)


def test_what_leaves_the_machine() -> None:
    inside = ["unix:/run/s.sock", "127.0.0.1:5", "localhost:5", "[::1]:5"]
    outside = ["0.0.0.0:5", "[::]:5", "scheduler:5", "192.0.2.7:5"]
    assert [leaves_machine(address) for address in inside + outside] == [False] * 4 + [True] * 4
