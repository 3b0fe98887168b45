"""From what the user typed as MODEL to a local Hugging Face folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.default_model import DEFAULT_MODEL, default_model_folder
from octavo.errors import ModelError
from octavo.gguf_store import convert_gguf_file
from octavo.progress import stage

Source = Literal["default", "folder", "gguf", "hub"]

# "gpt2" or "organisation/name"; anything else is meant as a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Top-level files only ("*/*" is excluded below): sub-folders hold other formats of the same weights.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# "consolidated" files repeat the weights under the vendor's own names.
_HUB_EXCLUDED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model ready to be loaded: `path` holds config.json, safetensors and a tokenizer."""

    path: Path
    name: str  # what `/v1/models` calls it unless --served-model-name is given
    source: Source


def resolve_model(model: str | None, *, revision: str | None = None, gguf_dtype: str = "float32") -> ResolvedModel:
    """Find MODEL, downloading or converting it first if need be.

    `model` is empty (or the default's name), a Hugging Face folder, a `.gguf` file or a hub id, and
    a path that exists wins over a hub id of the same spelling. Raises ModelError.
    """
    name = served_name(model)
    if not model:
        return ResolvedModel(default_model_folder(), name, "default")
    path = Path(model).expanduser()
    if path.is_dir():
        return ResolvedModel(_checked_folder(path.resolve()), name, "folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a Hugging Face folder nor a .gguf file")
        return ResolvedModel(convert_gguf_file(path, gguf_dtype), name, "gguf")
    if model == DEFAULT_MODEL:
        return ResolvedModel(default_model_folder(), name, "default")
    if path.suffix == ".gguf" or _HUB_ID.fullmatch(model) is None:
        raise ModelError(f"no such model: {model} (a folder, a .gguf file or a hub id like organisation/name)")
    return ResolvedModel(_checked_folder(_hub_folder(model, revision)), name, "hub")


def served_name(model: str | None) -> str:
    """What MODEL is called by default, without looking for it: services on different machines must agree."""
    if not model:
        return DEFAULT_MODEL
    if model.endswith(".gguf"):
        return Path(model).stem
    if model.startswith(("/", ".", "~")) or Path(model).is_dir():
        return Path(model).expanduser().resolve().name
    return model


def _checked_folder(folder: Path) -> Path:
    """Say here, in words, what would otherwise fail deep inside a loading executor."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; to serve a GGUF name the file: {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{folder} is not a Hugging Face model folder: no config.json{hint}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors weights (other weight formats are not read)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} has no tokenizer (tokenizer.json)")
    return folder


def _hub_folder(repo_id: str, revision: str | None) -> Path:
    # Imported here: half a second that no local model should wait for.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_EXCLUDED,
                local_files_only=local_files_only,
            )
        )

    advice = "name a local folder or .gguf file, or leave MODEL out for the built-in default"
    try:
        if constants.HF_HUB_OFFLINE:
            return fetch(local_files_only=True)
        with stage(f"Fetching {repo_id} from the model hub"):
            return fetch(local_files_only=False)
    except GatedRepoError as error:
        raise ModelError(f"{repo_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the model hub knows no {repo_id} (is it private? set HF_TOKEN)") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo_id} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the model hub cannot be reached"
        raise ModelError(f"{repo_id} is not on this machine and {why}; {advice}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"could not fetch {repo_id} from the model hub ({_one_line(error)}); {advice}") from error


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
