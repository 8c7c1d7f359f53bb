"""A tokenizer's files in a model's folder: found, copied, and described as Hugging Face's library reads them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from megatron.tokenizer.config import NEEDED, TokenizerConfig
from megatron.tokenizer.protocol import Tokenizer

_VOCABULARY, _MERGES, _WHOLE, _PIECES = "vocab.json", "merges.txt", "tokenizer.json", "vocab.txt"
_DESCRIPTION = "tokenizer_config.json"


def find_tokenizer(directory: Path) -> TokenizerConfig | None:
    """The tokenizer in a folder of Hugging Face's, None where there is none that is known."""
    if (directory / _VOCABULARY).is_file() and (directory / _MERGES).is_file():
        vocabulary, merges = str(directory / _VOCABULARY), str(directory / _MERGES)
        return TokenizerConfig("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    if (directory / _PIECES).is_file():
        return TokenizerConfig(_word_pieces(directory), vocab_file=str(directory / _PIECES))
    if (directory / _WHOLE).is_file():
        return TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(directory / _WHOLE))
    return None


def _word_pieces(directory: Path) -> str:
    """The type of the tokenizer whose `vocab.txt` is there: it lowers letters unless its description says no."""
    try:
        described = json.loads((directory / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        described = {}
    lowers = not isinstance(described, dict) or described.get("do_lower_case", True)
    return "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"


def _files(config: TokenizerConfig) -> dict[str, Path]:
    """The files of a tokenizer by the field that names them."""
    names = [name for name in NEEDED[config.tokenizer_type] if name != "vocab_size"]
    return {name: Path(getattr(config, name)) for name in names}


def copied_files(config: TokenizerConfig, directory: Path) -> TokenizerConfig:
    """The same tokenizer with its files copied to `directory`, which is made if there are any."""
    places = {name: directory / path.name for name, path in _files(config).items()}
    for name, place in places.items():
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(getattr(config, name), place)
    changes: dict[str, Any] = {name: str(place) for name, place in places.items()}
    return dataclasses.replace(config, **changes)


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids that open and end a text, as a model's config names them."""
    try:
        end: int | None = tokenizer.eod
    except ValueError:
        end = None
    return {"bos_token_id": end, "eos_token_id": end}


def describe_for_hugging_face(config: TokenizerConfig, directory: Path, longest: int) -> list[str]:
    """Put the tokenizer into a folder of Hugging Face's; returns sentences where that cannot be done.

    `longest` is the length of the longest text of the model, in tokens.
    """
    names = {"vocab_file": _VOCABULARY, "merge_file": _MERGES, "tokenizer_model": _WHOLE}
    kinds = {"GPT2BPETokenizer": "GPT2Tokenizer", "HuggingFaceTokenizer": "PreTrainedTokenizerFast"}
    kinds |= {"BertWordPieceLowerCase": "BertTokenizer", "BertWordPieceCase": "BertTokenizer"}
    if config.tokenizer_type not in kinds:
        return [f"no tokenizer is written: --tokenizer-type {config.tokenizer_type} has no form there"]
    described: dict[str, Any] = {"tokenizer_class": kinds[config.tokenizer_type], "model_max_length": longest}
    if described["tokenizer_class"] == "BertTokenizer":
        names["vocab_file"], described["do_lower_case"] = _PIECES, config.tokenizer_type == "BertWordPieceLowerCase"
    for name, path in _files(config).items():
        shutil.copyfile(path, directory / names[name])
    (directory / _DESCRIPTION).write_text(json.dumps(described, indent=2), encoding="utf-8")
    return []
