"""Special tokens: what vocabularies call them, and the ids that a tokenizer has for them."""

from collections.abc import Callable, Iterable, Mapping

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


class WithSpecialIds:
    """The special ids of a tokenizer, one property a use; ValueError for a use that the vocabulary has no token for.

    Args:
        ids: from a use in `NAMES` to an id.
        more: further ids that stand for no text.
        source: what complaints call the vocabulary, a flag and its value.
    """

    def __init__(self, ids: Mapping[str, int], more: Iterable[int], source: str) -> None:
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
