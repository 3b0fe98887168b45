"""One page of what a KV cache holds, from the scheduler's packed columns to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from octavo_shared.control import unpack_column


def render_page(reply: Mapping[str, Any]) -> bytes:
    """The answer of ``GET /v1/kv``.

    Numbers that stand for words (``reply["words"]``: column to its words) become those words. Columns that are no packed
    numbers go through as they are.
    """
    columns: dict[str, Any] = {"block": list(range(reply["start"], reply["start"] + len(reply["columns"]["owners"])))}
    for name, column in reply["columns"].items():
        values = unpack_column(column) if isinstance(column, str) else column
        if (words := reply["words"].get(name)) is not None:
            values = [words[value] for value in values]
        columns[name] = values
    page = {key: value for key, value in reply.items() if key not in ("columns", "words", "totals")}
    return orjson.dumps(
        {"object": "kv", **page, "columns": columns, "totals": reply["totals"]}, option=orjson.OPT_SERIALIZE_NUMPY
    )
