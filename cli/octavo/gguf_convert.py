"""Turn a GGUF file into a Hugging Face folder. Run as a process: `python -m octavo.gguf_convert SRC DEST`.

It is a process of its own because it imports torch and transformers, which the command that asked
for the model must not pay for. Progress goes to stdout, one JSON object per line:
`{"stage": str, "fraction": float}`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors

# Pre-tokenisers whose first step isolates every digit before the GPT-2 byte-level split. The set is
# the one llama.cpp gives the pattern `\p{N}` followed by GPT-2's (src/llama-vocab.cpp).
DIGIT_SPLITTING_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# Pre-tokenisers for which a plain byte-level split is right.
PLAIN_PRE_TOKENIZERS = frozenset({"default", "gpt-2"})


def restore_digit_split(tokenizer: Tokenizer, pre_tokenizer_name: str | None) -> bool:
    """Give back the `Digits` step that transformers' GGUF loader drops; says whether it changed anything.

    transformers 5.24 rebuilds such tokenizers with a bare ByteLevel step, so " 12" may become one
    token where the model was trained on one token per digit.
    """
    if pre_tokenizer_name not in DIGIT_SPLITTING_PRE_TOKENIZERS:
        return False
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return True


def ensure_bos(tokenizer: Tokenizer, bos_token: str) -> None:
    """Have `tokenizer.encode` put `bos_token` first, as the GGUF's `add_bos_token` asks, if it does not yet."""
    bos_id = tokenizer.token_to_id(bos_token)
    if bos_id is None or tokenizer.encode("a").ids[:1] == [bos_id]:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A",
        pair=f"{bos_token} $A {bos_token}:1 $B:1",
        special_tokens=[(bos_token, bos_id)],
    )


def _report(stage: str, fraction: float) -> None:
    print(json.dumps({"stage": stage, "fraction": round(fraction, 4)}), flush=True)


def _forward_tensor_progress() -> None:
    """Turn the loader's own progress bar into ours: most of the time is spent under it."""
    import transformers.modeling_gguf_pytorch_utils as loader

    original = getattr(loader, "tqdm", None)
    if original is None:  # cosmetic only: another release without this bar still converts
        return

    def reporting(iterable: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(iterable)
        for index, item in enumerate(items):
            _report("weights", index / len(items))
            yield item

    loader.tqdm = reporting  # type: ignore[attr-defined]


def _convert_tokenizer(source: Path, destination: Path, max_length_tokens: int) -> None:
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, get_gguf_tokenizer

    _, tokenizer_dict, tokenizer_config = get_gguf_tokenizer(str(source))
    pre = tokenizer_dict.get("pre_tokenizer_type")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    backend: Tokenizer = tokenizer.backend_tokenizer
    known = pre in GGUF_PRE_TOKENIZER_SPLITS or pre in PLAIN_PRE_TOKENIZERS or pre is None
    if not restore_digit_split(backend, pre) and not known and tokenizer_dict.get("tokenizer_type") == "gpt2":
        print(f"warning: unknown pre-tokenizer {pre!r}; token ids may differ from the original's", file=sys.stderr)
    if tokenizer_config.get("add_bos_token") and tokenizer_config.get("bos_token"):
        ensure_bos(backend, tokenizer_config["bos_token"])
    tokenizer.model_max_length = max_length_tokens
    # In tokenizer_config.json rather than a file of its own: readers of every age find it there.
    tokenizer.save_pretrained(str(destination), save_jinja_files=False)
    backend.save(str(destination / "tokenizer.json"))
    # What only described the GGUF file on this machine.
    _drop_keys(destination / "tokenizer_config.json", ("gguf_file", "name_or_path", "is_local", "local_files_only"))


def _drop_keys(path: Path, keys: tuple[str, ...]) -> None:
    config = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k not in keys}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, destination: Path, dtype_name: str) -> None:
    """Write `source` (GGUF) into the existing, empty folder `destination` as `dtype_name` safetensors.

    Quantised tensors are dequantised; float32 holds every GGUF type's values exactly.
    Raises ValueError for an architecture that transformers cannot rebuild.
    """
    _report("import", 0.0)
    import torch
    from transformers import AutoModelForCausalLM

    _forward_tensor_progress()
    _report("weights", 0.0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=getattr(torch, dtype_name)
    )
    _report("save", 0.0)
    # transformers 5.24 keeps calling the model quantised after it dequantised every tensor, and
    # refuses to save it until both marks are gone.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(destination))
    _drop_keys(destination / "config.json", ("_model_name_or_path", "_name_or_path"))
    _report("tokenizer", 0.0)
    _convert_tokenizer(source, destination, int(getattr(model.config, "max_position_embeddings", 0)) or 2**30)
    _report("done", 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo.gguf_convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args()
    # The file names everything needed; a look-up on a hub would only add a way to fail.
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(args.source.resolve(), args.destination, args.dtype)


if __name__ == "__main__":
    main()
