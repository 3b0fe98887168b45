"""An executor's life: read the model, size the pool, attach, step, and leave nothing unsaid."""

from __future__ import annotations

import contextlib
import logging
import signal

from octavo_executor.load import LoadedModel, load_model
from octavo_executor.logged import LoggedMark
from octavo_executor.outbox import Outbox
from octavo_executor.page_names import PageNameTable
from octavo_executor.session import RefusedError, Session
from octavo_executor.spec import ModelError
from octavo_executor.step_loop import StepLoop
from octavo_shared.ids import mint_incarnation
from octavo_shared.settings import ExecutorSettings, SettingError, split_list
from octavo_shared.telemetry import setup_logging
from octavo_shared.tls import channel_credentials, metadata_of

__all__ = ["LoadedModel", "load_model", "run"]

logger = logging.getLogger(__name__)

FLUSH_S = 5.0


def run(settings: ExecutorSettings) -> int:
    """Run an executor until SIGINT or SIGTERM; returns the exit status."""
    setup_logging("executor", settings.log_level)
    incarnation = mint_incarnation()
    try:
        credentials = channel_credentials(settings)
        model = load_model(settings, incarnation)
    except (SettingError, ModelError) as error:
        logger.error("%s", error)
        return 2
    info = model.info
    logger.info(
        "%s ready: %d blocks of %d tokens (%.2f GiB), %d more on the host (%.2f GiB), model length %d",
        info.model,
        info.num_device_blocks,
        info.block_size,
        info.num_device_blocks * info.block_bytes / 2**30,
        info.num_host_blocks,
        info.num_host_blocks * info.block_bytes / 2**30,
        info.max_model_len,
    )
    session = Session(
        split_list(settings.scheduler_address),
        info,
        settings.drain_timeout_s,
        credentials=credentials,
        metadata=metadata_of(settings),
    )
    logged = LoggedMark(session.send)
    names = PageNameTable(info.num_device_blocks, info.num_host_blocks, info.block_size)
    outbox = Outbox(
        settings.redis_url,
        settings.model_name,
        incarnation,
        settings.outbox_capacity,
        logged=logged.note,
        broken=session.close,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: session.drain())
    status = 0
    try:
        StepLoop(model.runner, session, outbox, logged, names).run()
    except RefusedError as error:
        logger.error("the scheduler refuses this executor: %s", error)
        status = 2
    finally:
        if not outbox.close(FLUSH_S):
            logger.error("some tokens could not be appended to the log")
            status = 1
        session.close()
        with contextlib.suppress(Exception):
            session.join()
    return status
