"""What the gateway reads from a model's folder: tokenizer, chat template, sampling defaults, end-of-sequence ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_gateway.chat_template import ChatTemplate
from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.settings import GatewaySettings, SettingError

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """Everything about the model that the gateway itself needs."""

    tokenizer: ModelTokenizer
    chat_template: ChatTemplate | None
    # Ids at which the model ends by itself.
    eos_token_ids: frozenset[int]
    # Sampling defaults the model's authors recommend; "max_tokens" may be among them.
    defaults: Mapping[str, float] = field(default_factory=dict)


def load_assets(settings: GatewaySettings) -> ModelAssets:
    """Read the model folder.

    Raises:
        SettingError: the folder has no usable tokenizer.json, or the chat template cannot be read.
    """
    folder = Path(settings.model)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SettingError(f"--model (OCTAVO_MODEL): {path} does not exist")
    try:
        tokenizer = ModelTokenizer.load(path)
    except Exception as error:
        # The library raises plain exceptions for whatever is wrong with the file.
        raise SettingError(f"--model (OCTAVO_MODEL): {path} is no tokenizer: {error}") from error
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation_config = _read_json(folder / "generation_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    source = _template_source(settings.chat_template, folder, tokenizer_config)
    try:
        template = None if source is None else ChatTemplate(source, special_tokens)
    except Exception as error:
        raise SettingError(f"--chat-template (OCTAVO_CHAT_TEMPLATE): {error}") from error
    return ModelAssets(
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=_eos_ids(tokenizer, special_tokens, generation_config, _read_json(folder / "config.json")),
        defaults=_defaults(generation_config) if settings.generation_config == "auto" else {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingError(f"--model (OCTAVO_MODEL): {path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; each is a string or an object with its content."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_source(setting: str | None, folder: Path, config: Mapping[str, Any]) -> str | None:
    if setting is not None:
        if "\n" not in setting and len(setting) < 4096 and Path(setting).is_file():
            return Path(setting).read_text("utf-8")
        if "{" not in setting:
            raise SettingError(f"--chat-template (OCTAVO_CHAT_TEMPLATE): {setting!r} is neither a file nor a template")
        return setting
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text("utf-8")
    templates = config.get("chat_template")
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None


def _eos_ids(
    tokenizer: ModelTokenizer, special_tokens: Mapping[str, str], *configs: Mapping[str, Any]
) -> frozenset[int]:
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    if (name := special_tokens.get("eos_token")) is not None and (own := tokenizer.id_of(name)) is not None:
        ids.add(own)
    return frozenset(ids)


def _defaults(config: Mapping[str, Any]) -> dict[str, float]:
    found = {name: config[name] for name in _DEFAULTS if isinstance(config.get(name), (int, float))}
    if isinstance(config.get("max_new_tokens"), int):
        found["max_tokens"] = config["max_new_tokens"]
    return found
