"""Which tokens BERT is to predict, and what it sees in their place: whole-word n-gram masking.

As in the recipe of the published models: whole words in n-grams of one to three, n with probability proportional to
1/n; of the tokens in them 80 % become [MASK], 10 % a random token and 10 % stay, each by itself.
"""

import dataclasses
from collections.abc import Set
from functools import cached_property

import numpy as np

from megatron.data.bert_draws import Draws

NOT_MASKED = -1  # label of a token that is not to be predicted
MAX_NGRAM = 3  # words
_MASKED, _RANDOM = 0.8, 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class BertIds:
    """What must be known of a vocabulary.

    Attributes:
        special_ids: all ids that stand for no text, the four above among them, the unknown word's too. They are neither
            masked, wherever they come from, nor drawn as random tokens.
        continues_word: whether an id goes on with the word of the id before it: bool [vocabulary].

    Raises ValueError where an id is outside the vocabulary or no other ids are left.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    special_ids: Set[int]
    continues_word: np.ndarray

    def __post_init__(self) -> None:
        size = self.vocab_size
        outside = sorted(i for i in {*self._own, *self.special_ids} if not 0 <= i < size)
        if outside:
            raise ValueError(f"special ids {outside} lie outside the vocabulary of {size}")
        if len(self.ordinary) == 0:
            raise ValueError(f"all {size} ids of the vocabulary are special: there is nothing to predict")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.continues_word)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.cls, self.sep, self.mask, self.pad

    @cached_property
    def is_special(self) -> np.ndarray:
        """bool [vocabulary]."""
        table = np.zeros(self.vocab_size, bool)
        table[[*self._own, *self.special_ids]] = True
        return table

    @cached_property
    def ordinary(self) -> np.ndarray:
        """All ids but the special ones: int64 [n]."""
        return np.flatnonzero(~self.is_special)


def mask_tokens(tokens: np.ndarray, ids: BertIds, mask_prob: float, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Choose what is to be predicted in `tokens`, int64 [n], ids within the vocabulary.

    Returns what the model sees, int64 [n], and the labels, int64 [n]: the token where it is to be predicted, else -1.
    The number of these is `mask_prob` times the number of tokens that are not special, on average over the draws; at
    least one word is chosen where there is any.
    """
    seen, labels = tokens.copy(), np.full(len(tokens), NOT_MASKED, np.int64)
    maskable = ~ids.is_special[tokens]
    at = np.flatnonzero(maskable)
    if len(at) == 0:
        return seen, labels
    # the first token behind a special one begins a word even if truncation has cut that word's head off
    begins = ~ids.continues_word[tokens[at]]
    begins[0] = True
    begins[1:] |= np.diff(at) > 1
    word = np.cumsum(begins) - 1  # of each maskable token
    chosen = at[choose_words(np.bincount(word), mask_prob * len(at), draws)[word]]
    labels[chosen] = tokens[chosen]
    seen[chosen] = _replaced(tokens[chosen], ids, draws)
    return seen, labels


def _replaced(tokens: np.ndarray, ids: BertIds, draws: Draws) -> np.ndarray:
    kind, which = draws.uniform(2 * len(tokens)).reshape(2, -1)
    random = ids.ordinary[(which * len(ids.ordinary)).astype(np.int64)]
    return np.where(kind < _MASKED, ids.mask, np.where(kind < _MASKED + _RANDOM, random, tokens))


def choose_words(sizes: np.ndarray, budget: float, draws: Draws) -> np.ndarray:
    """Which of the words with `sizes` tokens, int64 [w], are masked: bool [w].

    N-grams that do not overlap are laid at random places over the words. One that meets a special token goes on behind
    it, one that meets the end goes on at the beginning: no place is more likely than another. Their words are taken,
    n-gram by n-gram, as long as their tokens stay within `budget`. The next word is taken with the probability that
    makes the expected number of tokens equal the budget, and in any case if it is the first.
    """
    starts, lengths = place_ngrams(len(sizes), min(len(sizes), int(np.ceil(budget))), draws)
    ends = np.cumsum(lengths)
    words = (np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)) % len(sizes)
    tokens = np.cumsum(sizes[words])
    taken = int(np.searchsorted(tokens, budget, side="right"))
    if taken < len(words):
        room = budget - (tokens[taken - 1] if taken else 0)
        taken += bool(taken == 0 or draws.uniform(1)[0] * sizes[words[taken]] < room)
    chosen = np.zeros(len(sizes), bool)
    chosen[words[:taken]] = True
    return chosen


def place_ngrams(words: int, least: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """N-grams of `least` or more of `words` words in all, `1 <= least <= words`: first words and lengths, int64 [k].

    Lengths are drawn first, each n with probability proportional to 1/n (the last is cut where no words are left), then
    the n-grams and the words outside them are put in random order on a circle, which is opened between any two words:
    behind the last comes the first. The order of the result says nothing about places.
    """
    weights = np.cumsum(1 / np.arange(1, MAX_NGRAM + 1))
    lengths = 1 + np.searchsorted(weights[:-1] / weights[-1], draws.uniform(least), side="right")
    ends = np.cumsum(lengths)
    k = int(np.searchsorted(ends, least)) + 1
    lengths = lengths[:k]
    lengths[-1] -= max(int(ends[k - 1]) - words, 0)
    widths = np.ones(words - int(lengths.sum()) + k, np.int64)  # the n-grams, then the other words
    widths[:k] = lengths
    order = draws.order(len(widths))
    places = np.empty(len(widths), np.int64)
    places[order] = np.cumsum(widths[order]) - widths[order]
    return (places[:k] + draws.below(words)) % words, lengths
