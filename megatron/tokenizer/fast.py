"""Tokenizers that run on the library `tokenizers`: GPT-2's byte-level BPE, and any `tokenizer.json`."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from megatron.tokenizer.special import WithSpecialIds, ids_by_use


class FastTokenizer(WithSpecialIds):
    """A `tokenizers.Tokenizer` behind our interface (`megatron.tokenizer.Tokenizer`).

    Args:
        backend: the tokenizer; it is told to read names of special tokens in a text as text.
        source: what complaints call it, a flag and its value.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        added = backend.get_added_tokens_decoder()
        super().__init__(ids_by_use(backend.token_to_id), (i for i, t in added.items() if t.special), source)
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def continues_word(self) -> NDArray[np.bool_]:
        """True for the ids of WordPiece's `##...` tokens. bool [vocab_size]; ValueError for other models."""
        if not isinstance(self.backend.model, models.WordPiece):
            raise ValueError(f"{self._source}: only WordPiece and SentencePiece mark the ids that continue a word")
        prefix = self.backend.model.continuing_subword_prefix
        continues = np.zeros(self.vocab_size, np.bool_)
        continues[[i for token, i in self.backend.get_vocab().items() if token.startswith(prefix)]] = True
        continues[list(self.special_ids)] = False
        return continues

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`; special tokens are neither recognised in it nor added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, on as many threads as the library takes (`TOKENIZERS_PARALLELISM`)."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i}: {self._source} has ids 0 to {self.vocab_size - 1}")
        return self.backend.decode(list(ids), skip_special_tokens=False)


def gpt2_bpe_tokenizer(vocab_file: str, merge_file: str) -> FastTokenizer:
    """GPT-2's tokenizer from its two files; `<|endoftext|>` ends a document, and is text where it stands in a text.

    ValueError for files that are missing, damaged or do not belong together.
    """
    vocabulary = _read_vocabulary(vocab_file)
    merges = _read_merges(merge_file)
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--merge-file {merge_file} does not fit --vocab-file {vocab_file}: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return FastTokenizer(backend, f"--vocab-file {vocab_file}")


def hugging_face_tokenizer(path: str) -> FastTokenizer:
    """The tokenizer of a `tokenizer.json`; its special ids are those with the names that
    `special.NAMES` lists."""
    text = _read_text("--tokenizer-model", path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from None
    return FastTokenizer(backend, f"--tokenizer-model {path}")


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} is not a text file in UTF-8") from None


def _read_vocabulary(path: str) -> dict[str, int]:
    """The dict of a vocab.json, whose ids are distinct and which has all 256 one-byte tokens."""
    text = _read_text("--vocab-file", path)
    try:
        vocabulary = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--vocab-file {path} is not JSON: {error}") from None
    # bool is an int to Python, not to a vocabulary
    if not isinstance(vocabulary, dict) or any(type(i) is not int or not 0 <= i < 2**31 for i in vocabulary.values()):
        raise ValueError(f"--vocab-file {path}: expected a JSON object from token to id")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError(f"--vocab-file {path}: several tokens have the same id")
    missing = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in vocabulary]
    if missing:
        # without them the library would drop bytes of the text in silence
        raise ValueError(f"--vocab-file {path}: {len(missing)} of the 256 one-byte tokens are missing")
    return vocabulary


def _read_merges(path: str) -> list[tuple[str, str]]:
    """The pairs of a merges.txt; a first line that starts with `#version` is skipped."""
    pairs = []
    for number, line in enumerate(_read_text("--merge-file", path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        words = line.rstrip("\r").split(" ")
        if len(words) != 2:
            raise ValueError(f"--merge-file {path}, line {number}: expected two tokens with a blank between them")
        pairs.append((words[0], words[1]))
    return pairs
