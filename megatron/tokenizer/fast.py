"""Tokenizers that run on the library `tokenizers`: GPT-2's byte-level BPE, BERT's WordPiece, any `tokenizer.json`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.tokenizer.files import read_bpe_vocabulary, read_merges, read_text, read_word_pieces
from megatron.tokenizer.special import NAMES, WithSpecialIds, ids_by_use, require_unicode, respell


class FastTokenizer(WithSpecialIds):
    """A `tokenizers.Tokenizer` behind our interface (`megatron.tokenizer.Tokenizer`).

    Args:
        backend: the tokenizer. Tokens with names of `special.NAMES` become special tokens of it.
        source: what complaints call it, a flag and its value.
        parse_special_tokens: whether names of special tokens in a text are special tokens; else they are text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str, parse_special_tokens: bool = False) -> None:
        ids = ids_by_use(backend.token_to_id)
        added = backend.get_added_tokens_decoder()
        backend.add_special_tokens([str(backend.id_to_token(i)) for i in set(ids.values()) - added.keys()])
        backend.no_truncation()
        backend.no_padding()
        vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if vocab_size == 0:
            raise ValueError(f"{source} has no tokens")
        super().__init__(vocab_size, ids, (i for i, token in added.items() if token.special), source)
        self.backend = backend
        self._parse_special_tokens = parse_special_tokens
        backend.encode_special_tokens = not parse_special_tokens
        self._spellings: dict[int, list[int]] = {}
        if not parse_special_tokens:
            self._spellings = self._find_spellings()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # the library forgets it when it is pickled
        self.backend.encode_special_tokens = not self._parse_special_tokens

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
        """The ids of `text`, no special tokens added."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, on as many threads as the library takes (`TOKENIZERS_PARALLELISM`)."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            require_unicode(texts)
            raise ValueError(f"{self._source}: {error}") from None
        return [respell(encoding.ids, self._spellings) for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their names."""
        return self.backend.decode(self._checked(ids), skip_special_tokens=False)

    def _find_spellings(self) -> dict[int, list[int]]:
        """For special tokens that the model finds in a text by its own rules: the ids that spell their names.

        Unigram and whole-word models do, and tokenizers that have such a token among the ordinary added ones.
        """
        found = {}
        for i in self._names():
            name = str(self.backend.id_to_token(i))
            if i in self.tokenize(name):
                # in two parts, neither of which is the name
                parts = [token for part in (name[:1], name[1:]) if part for token in self.backend.model.tokenize(part)]
                found[i] = [token.id for token in parts]
        return found


def gpt2_bpe_tokenizer(vocab_file: str, merge_file: str, parse_special_tokens: bool = False) -> FastTokenizer:
    """GPT-2's tokenizer from its two files; `<|endoftext|>` ends a document.

    ValueError for files that are missing, damaged or do not belong together.
    """
    vocabulary = read_bpe_vocabulary(vocab_file)
    merges = read_merges(merge_file)
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--merge-file {merge_file} does not fit --vocab-file {vocab_file}: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return FastTokenizer(backend, f"--vocab-file {vocab_file}", parse_special_tokens)


def bert_word_piece_tokenizer(vocab_file: str, lower_case: bool, parse_special_tokens: bool = False) -> FastTokenizer:
    """BERT's tokenizer from its vocab.txt; `lower_case` also takes accents off. `[SEP]` ends a document.

    Control characters are dropped, CJK characters and punctuation stand alone, and a word of more than 100 characters
    is unknown, as in Hugging Face's (the first BERT's program allowed 200). ValueError for a file that is missing or
    damaged.
    """
    unknown = NAMES["unk"][0]
    model = models.WordPiece(vocab=read_word_pieces(vocab_file), unk_token=unknown, max_input_chars_per_word=100)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case, strip_accents=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return FastTokenizer(backend, f"--vocab-file {vocab_file}", parse_special_tokens)


def hugging_face_tokenizer(path: str, parse_special_tokens: bool = False) -> FastTokenizer:
    """The tokenizer of a `tokenizer.json`; its special ids are those with the names that `special.NAMES` lists."""
    text = read_text("--tokenizer-model", path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from None
    return FastTokenizer(backend, f"--tokenizer-model {path}", parse_special_tokens)
