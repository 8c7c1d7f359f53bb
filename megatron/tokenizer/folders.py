"""A tokenizer's files in a model's folder: found, copied, and described as Hugging Face's library reads them."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.base.files import new_folder
from megatron.tokenizer.config import NEEDED, TokenizerConfig
from megatron.tokenizer.protocol import Tokenizer

_VOCABULARY, _MERGES, _WHOLE, _PIECES = "vocab.json", "merges.txt", "tokenizer.json", "vocab.txt"
_DESCRIPTION = "tokenizer_config.json"
_CLASSES = {
    "GPT2BPETokenizer": "GPT2Tokenizer",
    "HuggingFaceTokenizer": "PreTrainedTokenizerFast",
    "BertWordPieceLowerCase": "BertTokenizer",
    "BertWordPieceCase": "BertTokenizer",
}


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
    except (OSError, ValueError, RecursionError):
        described = {}
    lowers = not isinstance(described, dict) or described.get("do_lower_case", True)
    return "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"


def _files(config: TokenizerConfig) -> dict[str, Path]:
    """The files of a tokenizer by the field that names them."""
    names = [name for name in NEEDED[config.tokenizer_type] if name != "vocab_size"]
    return {name: Path(getattr(config, name)) for name in names}


@contextlib.contextmanager
def copied_files(config: TokenizerConfig, directory: Path) -> Iterator[TokenizerConfig]:
    """The same tokenizer with its files copied to `directory`, which is made if there are any.

    Raises ValueError where another file has such a name there; after an error in the block what was made is taken away.
    """
    places = {name: directory / path.name for name, path in _files(config).items()}
    with contextlib.nullcontext() if not places else new_folder(directory), _new_files() as put:
        for name, place in places.items():
            put(place, Path(getattr(config, name)).read_bytes())
        changes: dict[str, Any] = {name: str(place) for name, place in places.items()}
        yield dataclasses.replace(config, **changes)


@contextlib.contextmanager
def _new_files() -> Iterator[Callable[[Path, bytes], None]]:
    """Gives what writes a file where there is none; after an error in the block those written are taken away.

    It raises ValueError for a name at which there is something else already.
    """
    made: list[Path] = []

    def put(path: Path, content: bytes) -> None:
        if path.exists():
            if not path.is_file() or path.read_bytes() != content:
                raise ValueError(f"{path}: there is another file of that name already, which is not overwritten")
            return
        made.append(path)
        path.write_bytes(content)

    try:
        yield put
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids that open and end a text, as a model's config names them."""
    try:
        end: int | None = tokenizer.eod
    except ValueError:
        end = None
    return {"bos_token_id": end, "eos_token_id": end}


@contextlib.contextmanager
def described_for_hugging_face(config: TokenizerConfig, directory: Path, longest: int) -> Iterator[list[str]]:
    """Put the tokenizer into a folder of Hugging Face's; gives sentences where that cannot be done.

    `longest` is the length of the longest text of the model, in tokens. Raises ValueError where another file has such
    a name there; after an error in the block what was made is taken away.
    """
    with new_folder(directory), _new_files() as put:
        if config.tokenizer_type in _CLASSES:
            for name, content in _their_files(config, longest).items():
                put(directory / name, content)
            yield []
        else:
            yield [f"no tokenizer is written: --tokenizer-type {config.tokenizer_type} has no form there"]


def _their_files(config: TokenizerConfig, longest: int) -> Mapping[str, bytes]:
    """The files of a tokenizer in a folder of Hugging Face's, by name."""
    names = {"vocab_file": _VOCABULARY, "merge_file": _MERGES, "tokenizer_model": _WHOLE}
    described: dict[str, Any] = {"tokenizer_class": _CLASSES[config.tokenizer_type], "model_max_length": longest}
    if described["tokenizer_class"] == "BertTokenizer":
        names["vocab_file"], described["do_lower_case"] = _PIECES, config.tokenizer_type == "BertWordPieceLowerCase"
    files = {names[name]: path.read_bytes() for name, path in _files(config).items()}
    return {**files, _DESCRIPTION: json.dumps(described, indent=2).encode()}
