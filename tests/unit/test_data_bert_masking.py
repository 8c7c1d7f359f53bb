"""Whole-word n-gram masking: shares, lengths and places within sampling error, words whole, special tokens spared."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.bert_draws import Draws
from megatron.data.bert_masking import BertIds, choose_words, mask_tokens, place_ngrams

VOCABULARY = 60
SPECIAL = {0, 1, 2, 3, 4}
CONTINUES = np.arange(VOCABULARY) >= 40
IDS = BertIds(cls=2, sep=3, mask=4, pad=0, special_ids=frozenset(SPECIAL), continues_word=CONTINUES)


def within(count: int, trials: int, probability: float, deviations: float = 4.0) -> bool:
    """Whether a binomial count is as near to its mean as sampling lets it be."""
    return abs(count - trials * probability) <= deviations * math.sqrt(trials * probability * (1 - probability))


def plain_words(tokens: list[int]) -> list[list[int]]:
    """Positions of the tokens of each word, special tokens left out."""
    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if token in SPECIAL:
            continue
        if words and words[-1][-1] == i - 1 and CONTINUES[token]:
            words[-1].append(i)
        else:
            words.append([i])
    return words


TEXTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@given(TEXTS, st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_words_are_masked_whole_and_special_tokens_never(tokens: list[int], mask_prob: float, seed: int) -> None:
    given_ = np.array(tokens, np.int64)
    seen, labels = mask_tokens(given_, IDS, mask_prob, Draws(seed))
    masked = labels >= 0
    np.testing.assert_array_equal(given_, tokens)  # left as it was
    np.testing.assert_array_equal(labels[masked], given_[masked])
    np.testing.assert_array_equal(seen[~masked], given_[~masked])
    words = plain_words(tokens)
    for word in words:
        assert len({bool(masked[i]) for i in word}) == 1
    in_words = {i for word in words for i in word}
    assert {int(i) for i in np.flatnonzero(masked)} <= in_words
    assert not set(seen[masked].tolist()) & (SPECIAL - {IDS.mask}), "a special token as a random one"
    budget = mask_prob * len(in_words)
    longest = max((len(word) for word in words), default=0)
    assert masked.any() == bool(words)
    # the budget is passed or missed by less than one word; the first word may be longer than it
    if words:
        assert budget - longest < masked.sum() < max(budget, 1) + longest


def test_what_goes_on_behind_a_special_token_is_a_word_of_its_own() -> None:
    tokens = np.array([2, 10, 41, 3, 45, 46, 3])  # the second segment begins within a word
    masked = {tuple(np.flatnonzero(mask_tokens(tokens, IDS, 0.5, Draws(i))[1] >= 0)) for i in range(60)}
    assert masked == {(1, 2), (4, 5)}


def test_everything_is_masked_where_that_is_asked_for() -> None:
    tokens = np.array([2, 10, 45, 11, 3, 12, 41, 42, 3])
    _, labels = mask_tokens(tokens, IDS, 1.0, Draws(1))
    assert labels.tolist() == [-1, 10, 45, 11, -1, 12, 41, 42, -1]


def test_the_share_of_masked_tokens_and_what_replaces_them() -> None:
    mask_prob = 0.4
    random = np.random.RandomState(0)
    tokens_in_all = masked = as_mask = as_other = kept = 0
    others: list[np.ndarray] = []
    for i in range(2500):
        tokens = np.concatenate([[2], random.randint(5, VOCABULARY, random.randint(20, 90)), [3]])
        seen, labels = mask_tokens(tokens, IDS, mask_prob, Draws(3, i))
        at = labels >= 0
        tokens_in_all += len(tokens) - 2
        masked += int(at.sum())
        as_mask += int((seen[at] == IDS.mask).sum())
        kept += int((seen[at] == labels[at]).sum())
        random_here = seen[at & (seen != IDS.mask) & (seen != labels)]
        as_other += len(random_here)
        others.append(random_here)
    assert within(masked, tokens_in_all, mask_prob)
    assert within(as_mask, masked, 0.8)
    same = 0.1 / 55  # a random token is the one that stands there already
    assert within(kept, masked, 0.1 + same)
    assert within(as_other, masked, 0.1 - same)
    counts = np.bincount(np.concatenate(others), minlength=VOCABULARY)
    assert not counts[:5].any()
    assert all(within(int(count), as_other, 1 / 55, 4.5) for count in counts[5:])


@pytest.mark.parametrize(("sizes", "budget"), [([3] * 10, 4.5), ([1] * 7, 1.05), ([1, 2, 3, 4, 5] * 3, 6.75)])
def test_the_expected_number_of_tokens_is_the_budget(sizes: list[int], budget: float) -> None:
    lengths = np.array(sizes)
    counts = np.array([lengths[choose_words(lengths, budget, Draws(8, i))].sum() for i in range(5000)])
    assert abs(counts.mean() - budget) <= 4 * counts.std() / math.sqrt(len(counts))


def test_a_first_word_longer_than_the_budget_is_taken() -> None:
    assert all(choose_words(np.array([5, 6]), 1.65, Draws(i)).sum() == 1 for i in range(200))


def test_ngram_lengths_have_probabilities_one_over_n() -> None:
    # one n-gram in so many words that it never meets their end
    drawn = np.array([place_ngrams(50, 1, Draws(4, i))[1][0] for i in range(10_000)])
    for n, probability in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert within(int((drawn == n).sum()), len(drawn), probability)
    assert set(drawn) == {1, 2, 3}


def test_ngram_lengths_seen_from_outside() -> None:
    n, words = 6000, 400
    longest_runs = np.zeros(4, int)
    for i in range(n):
        at = np.flatnonzero(choose_words(np.ones(words, np.int64), 3.0, Draws(6, i)))
        assert len(at) == 3
        ends = np.flatnonzero(np.concatenate([[True], np.diff(at) > 1, [True]]))
        longest_runs[np.diff(ends).max()] += 1
    # Three tokens are one n-gram of 3, or three of 1 (the third of any length, cut to one word), or else a run of 2 and
    # one of 1. N-grams touch, or one is opened at the end of the text, in about 4 texts of 400.
    three, singles = 2 / 11, (6 / 11) ** 2
    for run, probability in ((3, three), (1, singles), (2, 1 - three - singles)):
        slack = 4 * math.sqrt(n * probability * (1 - probability)) + n * 8 / words
        assert abs(longest_runs[run] - n * probability) < slack


@given(st.integers(1, 40), st.data(), st.integers(0, 10**6))
def test_ngrams_do_not_overlap(words: int, data: st.DataObject, seed: int) -> None:
    least = data.draw(st.integers(1, words))
    starts, lengths = place_ngrams(words, least, Draws(seed))
    covered = np.zeros(words, int)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        assert 1 <= length <= 3
        assert 0 <= start < words
        for word in range(start, start + length):
            covered[word % words] += 1
    assert covered.max() == 1
    assert least <= covered.sum() <= least + 2


def test_every_place_is_as_likely() -> None:
    n = 6000
    counts = sum(choose_words(np.ones(20, np.int64), 2.5, Draws(2, i)).astype(int) for i in range(n))
    assert all(within(int(count), n, 2.5 / 20) for count in counts)


def test_special_ids_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[60\] lie outside the vocabulary of 60"):
        BertIds(2, 3, 60, 0, SPECIAL, CONTINUES)
    with pytest.raises(ValueError, match="all 4 ids of the vocabulary are special"):
        BertIds(0, 1, 2, 3, set(), np.zeros(4, bool))


def test_nothing_but_special_tokens() -> None:
    seen, labels = mask_tokens(np.array([2, 4, 1, 3]), IDS, 0.15, Draws(1))
    assert seen.tolist() == [2, 4, 1, 3]
    assert labels.tolist() == [-1] * 4
