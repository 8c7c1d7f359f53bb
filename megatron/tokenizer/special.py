"""Special tokens: what vocabularies call them, and the ids that a tokenizer has for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

# What vocabularies call a token of each use, the most specific name first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "unk": ("[UNK]", "<unk>"),
}
_MEANINGS = {
    "eod": "end-of-document token",
    "cls": "classification token",
    "sep": "separator token",
    "mask": "mask token",
    "pad": "padding token",
    "bos": "beginning-of-text token",
}


def ids_by_use(token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """The id for each use in `NAMES` of which the vocabulary has a name; `token_to_id` gives None for what it lacks."""
    found = {use: [token_to_id(name) for name in names] for use, names in NAMES.items()}
    first = {use: next((i for i in ids if i is not None), None) for use, ids in found.items()}
    return {use: i for use, i in first.items() if i is not None}


def respell(ids: list[int], spellings: Mapping[int, list[int]]) -> list[int]:
    """`ids` with each one that is a key of `spellings` replaced by the ids that spell its name as text."""
    if not spellings or spellings.keys().isdisjoint(ids):
        return ids
    return [j for i in ids for j in spellings.get(i, (i,))]


def require_unicode(texts: Iterable[str]) -> None:
    """ValueError where a text has a lone surrogate, which is no character: no tokenizer takes it."""
    for text in texts:
        text.encode("utf-8")  # UnicodeEncodeError is a ValueError


class WithSpecialIds:
    """The special ids of a tokenizer, one property a use; ValueError for a use that the vocabulary has no token for.

    Args:
        vocab_size: one more than the largest id.
        ids: from a use in `NAMES` to an id.
        more: further ids that stand for no text.
        source: what complaints call the vocabulary, a flag and its value.
    """

    def __init__(self, vocab_size: int, ids: Mapping[str, int], more: Iterable[int], source: str) -> None:
        self.vocab_size = vocab_size
        self._ids_by_use = dict(ids)
        self._more = frozenset(more)
        self._source = source

    @property
    def eod(self) -> int:
        """Ends a document."""
        return self._id("eod")

    @property
    def cls(self) -> int:
        """Opens a sequence of BERT's."""
        return self._id("cls")

    @property
    def sep(self) -> int:
        """Ends each sentence of a pair."""
        return self._id("sep")

    @property
    def mask(self) -> int:
        """Stands for a token that is to be predicted."""
        return self._id("mask")

    @property
    def pad(self) -> int:
        """Fills a sequence up."""
        return self._id("pad")

    @property
    def bos(self) -> int:
        """Opens a text."""
        return self._id("bos")

    @property
    def special_ids(self) -> frozenset[int]:
        """All ids that stand for no text: those above, the unknown word's, and others that are called special."""
        return self._more.union(self._ids_by_use.values())

    def _id(self, use: str) -> int:
        if use not in self._ids_by_use:
            raise ValueError(f"{self._source}: no {_MEANINGS[use]}; looked for {', '.join(NAMES[use])}")
        return self._ids_by_use[use]

    def _names(self) -> frozenset[int]:
        """The special ids whose names could stand in a text; the unknown word's is no such name."""
        return self.special_ids - {self._ids_by_use.get("unk", -1)}

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """`ids` as plain integers; ValueError for one outside the vocabulary."""
        plain = [int(i) for i in ids]
        for i in plain:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i}: {self._source} has ids 0 to {self.vocab_size - 1}")
        return plain
