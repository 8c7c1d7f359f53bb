"""SentencePiece models, on the library `sentencepiece`."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor

from megatron.tokenizer.files import read_bytes
from megatron.tokenizer.special import WithSpecialIds, ids_by_use, require_unicode, respell

_BLANK = "\u2581"  # opens the first piece of a word


class SentencePieceTokenizer(WithSpecialIds):
    """A SentencePiece model (unigram or BPE, with or without bytes) behind our interface.

    The model's own end of sentence ends a document; `bos`, `pad` and the rest are there if the model has them.

    Args:
        path: the `.model` file. ValueError where it is missing, cut or something else.
        parse_special_tokens: whether names of special tokens in a text are special tokens; else they are text.
    """

    def __init__(self, path: str, parse_special_tokens: bool = False) -> None:
        self._model = _load(path)
        self._pieces = [self._model.id_to_piece(i) for i in range(self._model.get_piece_size())]
        ids = ids_by_use({piece: i for i, piece in enumerate(self._pieces)}.get)
        own = {"eod": self._model.eos_id(), "bos": self._model.bos_id(), "pad": self._model.pad_id()}
        ids |= {use: i for use, i in (own | {"unk": self._model.unk_id()}).items() if i >= 0}
        control = (i for i in range(len(self._pieces)) if self._model.is_control(i))
        super().__init__(len(self._pieces), ids, control, f"--tokenizer-model {path}")
        self._by_name = {self._pieces[i]: i for i in self._names()}
        longest_first = sorted(self._by_name, key=len, reverse=True)
        self._parsed = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if parse_special_tokens else None
        self._spellings = {} if parse_special_tokens else self._find_spellings()

    def continues_word(self) -> NDArray[np.bool_]:
        """True for pieces that do not open with SentencePiece's sign for a blank. bool [vocab_size]."""
        continues = np.array([not piece.startswith(_BLANK) for piece in self._pieces], np.bool_)
        continues[list(self.special_ids)] = False
        return continues

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, no special tokens added."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, on all cores unless `TOKENIZERS_PARALLELISM` is false."""
        # text, name, text, ..., name, text
        parts = [self._parsed.split(text) if self._parsed and self._by_name else [text] for text in texts]
        encoded = iter(self._encode([text for part in parts for text in part[::2]]))
        return [self._joined(part[1::2], encoded) for part in parts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names."""
        names = self._names()
        text = ""
        for special, run in itertools.groupby(self._checked(ids), names.__contains__):
            of_run = list(run)
            text += "".join(self._pieces[i] for i in of_run) if special else self._model.decode(of_run)
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        serial = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "off", "no", "0")
        try:
            encoded = self._model.encode(texts, num_threads=1 if serial else -1)
        except (TypeError, RuntimeError) as error:
            require_unicode(texts)
            raise ValueError(f"{self._source}: {error}") from None
        return [respell(ids, self._spellings) for ids in encoded]

    def _joined(self, names: Sequence[str], encoded: Iterator[list[int]]) -> list[int]:
        ids = next(encoded)
        for name in names:
            ids += [self._by_name[name], *next(encoded)]
        return ids

    def _find_spellings(self) -> dict[int, list[int]]:
        """For special pieces that the model finds in a text, as it was trained to: the ids that spell their names."""
        found = [(i, name) for name, i in self._by_name.items() if i in self._model.encode(name)]
        return {i: [j for character in name for j in self._spelled(character)] for i, name in found}

    def _spelled(self, character: str) -> list[int]:
        """The piece that is `character`, else its bytes, else the unknown piece."""
        names = [character], [f"<0x{byte:02X}>" for byte in character.encode("utf-8")]
        known = (name for name in names if not {self._model.piece_to_id(n) for n in name} & {self._model.unk_id()})
        return [self._model.piece_to_id(name) for name in next(known, [character])]


def _load(path: str) -> SentencePieceProcessor:
    data = read_bytes("--tokenizer-model", path)
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
        whole = {1, 2, 3} <= _fields(data)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from None
    if not whole:  # the library takes a file that ends between two pieces
        raise ValueError(f"--tokenizer-model {path} is not a whole SentencePiece model: its end is missing")
    return model


def _fields(message: bytes) -> set[int]:
    """The numbers of the fields of a protocol-buffer message. Of a model: pieces 1, trainer 2, normalizer 3."""
    fields, at = set(), 0
    while at < len(message):
        tag, at = _varint(message, at)
        length, at = _varint(message, at)
        fields.add(tag >> 3)
        # a model's fields all have a length (wire type 2); extensions of other types end the search
        if tag & 7 != 2:
            break
        at += length
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that starts at byte `at`, seven bits a byte, the lowest first; and where the next thing starts."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
