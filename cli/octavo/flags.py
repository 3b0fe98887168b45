"""Command-line flags made from the services' settings classes, and the environment made from flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from octavo_shared.settings import CommonSettings

# The order of the headings in --help; others follow in the order they are met.
_GROUP_ORDER = ("model", "HTTP", "scheduler", "cache", "output", "log", "observability")


def add_settings(parser: argparse.ArgumentParser, kinds: Sequence[type[CommonSettings]]) -> None:
    """One flag per setting of `kinds` (a setting they share gets one flag), under its group's heading.

    No flag has a default of its own: absent means "leave it to the environment or the default".
    """
    fields: dict[str, FieldInfo] = {}
    for kind in kinds:
        for name, info in kind.model_fields.items():
            fields.setdefault(name, info)
    groups: dict[str, list[str]] = {name: [] for name in _GROUP_ORDER}
    for name, info in fields.items():
        groups.setdefault(_group(info), []).append(name)
    for heading, names in groups.items():
        if names:
            group = parser.add_argument_group(heading)
            for name in names:
                _add_flag(group, name, fields[name])


def given_flags(args: argparse.Namespace, kinds: Sequence[type[CommonSettings]]) -> dict[str, Any]:
    """The settings that were given as flags."""
    names = {name for kind in kinds for name in kind.model_fields}
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def only_of(kind: type[CommonSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that `kind` has a setting for."""
    return {name: value for name, value in values.items() if name in kind.model_fields}


def environment_of(values: Mapping[str, Any]) -> dict[str, str]:
    """`OCTAVO_*` variables that make a service read `values`. None values are left out."""
    return {f"OCTAVO_{name.upper()}": _as_text(value) for name, value in values.items() if value is not None}


def is_set(name: str, flags: Mapping[str, Any]) -> bool:
    """Whether a setting was given at all, by flag or environment."""
    return name in flags or f"OCTAVO_{name.upper()}" in os.environ


def dashed(argv: Sequence[str]) -> list[str]:
    """`--max_model_len=4` as `--max-model-len=4`: both spellings are in use."""
    result = []
    for word in argv:
        flag, equals, value = word.partition("=")
        result.append(flag.replace("_", "-") + equals + value if word.startswith("--") else word)
    return result


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _group(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    return str(extra.get("group", "other")) if isinstance(extra, dict) else "other"


def _add_flag(group: argparse._ArgumentGroup, name: str, info: FieldInfo) -> None:
    options: dict[str, Any] = {"dest": name, "default": None, "help": _help(info)}
    kind = _without_none(info.annotation)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        options["choices"] = [str(choice) for choice in get_args(kind)]
    elif get_origin(kind) is list:
        # Given again it adds: of several keys, none is to be lost.
        whole = _without_none(get_args(kind)[0]) is int
        options |= {"action": "extend", "nargs": "+", "metavar": "N" if whole else "NAME"}
    else:
        # Values stay text here: pydantic parses flag and variable alike and names the setting in its errors.
        options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    group.add_argument("--" + name.replace("_", "-"), **options)


def _without_none(annotation: Any) -> Any:
    """`T` out of `T | None`, `Annotated[T, ...]` and their mixtures."""
    if hasattr(annotation, "__metadata__"):
        return _without_none(get_args(annotation)[0])
    if type(None) in get_args(annotation):
        return _without_none(next(arg for arg in get_args(annotation) if arg is not type(None)))
    return annotation


def _help(info: FieldInfo) -> str:
    text = (info.description or "").replace("%", "%%")
    if info.default in (None, "", []) or "efault" in text:
        return text
    return f"{text} [{_as_text(info.default)}]"
