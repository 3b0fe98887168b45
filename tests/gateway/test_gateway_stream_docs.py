"""The client in docs/streams.md, over a line that breaks again and again."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from gateway_stage import Reply, Stage, second_gateway

from octavo_gateway.tokenizer import ModelTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while in the warm sun of the afternoon."


@contextmanager
def breaking_line(ports: list[int], cuts: list[int]) -> Iterator[tuple[int, list[int]]]:
    """A port whose connections go to ``ports`` in turn and break after so many bytes; later ones do not. And a count."""
    listener = socket.create_server(("127.0.0.1", 0))
    lengths = iter(cuts)
    made: list[int] = []

    def serve(connection: socket.socket, port: int, limit: int) -> None:
        with connection, socket.create_connection(("127.0.0.1", port)) as upstream:
            threading.Thread(target=pump, args=(connection, upstream), daemon=True).start()
            while limit > 0 and (data := upstream.recv(min(4096, limit))):
                connection.sendall(data)
                limit -= len(data)
            connection.shutdown(socket.SHUT_RDWR)

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(4096):
                target.sendall(data)
        except OSError:
            pass

    def accept() -> None:
        for port in itertools.cycle(ports):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            made.append(port)
            threading.Thread(target=serve, args=(connection, port, next(lengths, 1 << 30)), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], made
    listener.close()


def test_the_client_of_the_page_gets_everything_once(
    make_stage: Callable[..., AbstractContextManager[Stage]], tokenizer: ModelTokenizer
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    ids = tokenizer.encode([TEXT], add_special_tokens=False)[0]
    with make_stage() as stage, second_gateway(stage) as other:
        stage.engine.reply = lambda record, choice: Reply(ids)
        stage.engine.step_s = 0.05
        cuts = [600] * 4
        with breaking_line([stage.server.port, other.server.port], cuts) as (port, made):
            url = f"http://127.0.0.1:{port}/v1/completions"
            chunks = list(names["stream"](url, {"prompt": "x", "max_tokens": len(ids)}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert len(made) >= 3
        assert len(stage.engine.records) == 1
