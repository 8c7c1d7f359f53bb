"""BERT's sample mapping: equal to a plain loop over sentences, every sentence in one sample an epoch, short samples."""

import math
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.data import bert_mapping
from megatron.data.bert_draws import Draws, hashed
from megatron.data.bert_mapping import build_bert_mapping

# documents of sentences with so many tokens each
CORPORA = st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=12)
PROBABILITIES = st.sampled_from([0.0, 0.1, 0.5, 1.0])
WORD = 2**64


def as_arrays(corpus: list[list[int]], before: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of all sentences and boundaries of the documents, behind `before` sentences that are not ours."""
    sizes = [7] * before + [size for document in corpus for size in document] + [7, 7]
    boundaries = before + np.cumsum([0] + [len(document) for document in corpus])
    return np.array(sizes, np.int32), boundaries.astype(np.int64)


def plain_splitmix64(key: int, salt: int) -> int:
    word = ((key + 1) * 0x9E3779B97F4A7C15 + salt) % WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def plain_target(sentence: int, salt: int, longest: int, short_seq_prob: float) -> int:
    word = plain_splitmix64(sentence, salt)
    if word // 2**32 < short_seq_prob * 2**32:
        return 2 + (word % 2**32) * (longest - 1) // 2**32
    return longest


def plain_epoch(
    sizes: np.ndarray, documents: np.ndarray, longest: int, short_seq_prob: float, seed: int, epoch: int, pairs: bool
) -> list[list[int]]:
    """The rows of one epoch in the order of the sentences, one sentence after another."""
    salt = int(np.random.Philox(np.random.SeedSequence([seed, 2, epoch])).random_raw())
    rows = []
    for begin, end in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        sentences = [i for i in range(begin, end) if sizes[i] > 0]
        if len(sentences) < (2 if pairs else 1):
            continue
        gathered: list[int] = []
        for position, sentence in enumerate(sentences):
            gathered.append(sentence)
            target = plain_target(gathered[0], salt, longest, short_seq_prob)
            left = len(sentences) - position - 1
            full = sum(sizes[gathered]) >= target and len(gathered) >= (2 if pairs else 1)
            if left == 0 or (full and left > 1):
                rows.append([gathered[0], sentence + 1, target])
                gathered = []
    return rows


@given(
    CORPORA,
    st.integers(2, 25),
    PROBABILITIES,
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.none() | st.integers(0, 60),
    st.sampled_from([1, 3, 1 << 20]),
    st.sampled_from([0, 2, 32]),
)
@example([[1, 1, 1]] * 40 + [[1] * 50] * 40, 5, 0.5, 1, True, 300, 7, 4)
def test_equal_to_a_plain_loop(
    corpus: list[list[int]],
    longest: int,
    short_seq_prob: float,
    seed: int,
    pairs: bool,
    asked: int | None,
    block: int,
    few: int,
) -> None:
    sizes, documents = as_arrays(corpus, before=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bert_mapping, "_BLOCK", block)
        patch.setattr(bert_mapping, "_FEW", few)
        found = build_bert_mapping(sizes, documents, asked, longest, short_seq_prob, seed, pairs=pairs)
    begin = 0
    for epoch in range(found.epochs):
        expected = plain_epoch(sizes, documents, longest, short_seq_prob, seed, epoch, pairs)
        assert sorted(found.rows[begin : begin + len(expected)].tolist()) == expected
        assert begin == 0 or begin < (asked or 0), "an epoch more than needed"
        begin += len(expected)
    assert len(found.rows) == begin
    assert begin >= (asked or 0) or begin == 0
    lone = sum(sum(size > 0 for size in document) == 1 for document in corpus)
    assert found.left_out == (lone if pairs else 0)


@given(CORPORA, st.integers(2, 25), PROBABILITIES, st.integers(0, 2**32), st.booleans())
def test_each_sentence_is_in_one_sample_an_epoch(
    corpus: list[list[int]], longest: int, short_seq_prob: float, seed: int, pairs: bool
) -> None:
    sizes, documents = as_arrays(corpus)
    mapping = build_bert_mapping(sizes, documents, None, longest, short_seq_prob, seed, pairs=pairs)
    assert mapping.epochs == 1
    used = np.zeros(len(sizes), int)
    document_of = np.repeat(np.arange(len(corpus)), np.diff(documents))
    for first, end, target in mapping.rows.tolist():
        used[first:end] += 1
        assert len(set(document_of[first:end])) == 1
        assert (sizes[first:end] > 0).sum() >= (2 if pairs else 1)
        assert 2 <= target <= longest
    for i, document in enumerate(corpus):
        present = [size > 0 for size in document]
        here = used[documents[i] : documents[i + 1]]
        if sum(present) >= (2 if pairs else 1):
            assert (here[present] == 1).all()
            assert (here <= 1).all()
        else:
            assert not here.any()


def a_corpus(documents: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(5)
    boundaries = np.concatenate([[0], np.cumsum(random.randint(0, 20, documents))])
    return random.randint(1, 12, boundaries[-1]).astype(np.int32), boundaries


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 1.0])
def test_the_share_of_short_samples_and_their_lengths(share: float) -> None:
    sizes, documents = a_corpus(4000)
    rows = build_bert_mapping(sizes, documents, 20_000, 41, share, 7).rows
    short = rows[rows[:, 2] < 41, 2].astype(float)
    # one of the 40 lengths that a short sample may have is that of a long one
    expected = share * 39 / 40
    assert abs(len(short) - len(rows) * expected) <= 4 * math.sqrt(len(rows) * expected * (1 - expected))
    if len(short):
        counts = np.bincount(short.astype(int), minlength=41)[2:41]
        assert len(counts) == 39
        spread = math.sqrt(len(short) / 39)
        assert abs(counts - len(short) / 39).max() <= 4.5 * spread


def test_epochs_are_whole_and_differ() -> None:
    sizes, documents = a_corpus(300)
    one = build_bert_mapping(sizes, documents, None, 30, 0.3, 9).rows
    mapping = build_bert_mapping(sizes, documents, len(one) + 1, 30, 0.3, 9)
    assert mapping.epochs == 2
    np.testing.assert_array_equal(mapping.rows[: len(one)], one)
    second = mapping.rows[len(one) :]
    covered = np.zeros(len(sizes), int)
    for first, end, _ in second.tolist():
        covered[first:end] += 1
    assert covered.max() == 1
    assert covered.sum() == sum(end - first for first, end, _ in one.tolist())
    assert sorted(second.tolist()) != sorted(one.tolist()), "the short samples lie elsewhere"
    assert build_bert_mapping(sizes, documents, len(one), 30, 0.3, 9).epochs == 1


def test_samples_are_in_random_order_by_the_seed() -> None:
    sizes, documents = a_corpus(300)
    one, same, other = (build_bert_mapping(sizes, documents, None, 30, 0.0, seed).rows for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert sorted(one.tolist()) == sorted(other.tolist())
    assert one.tolist() != other.tolist()
    # of random orders the rank correlation with the order of the text has a spread of 1/sqrt(n)
    assert abs(np.corrcoef(np.arange(len(one)), one[:, 0].argsort())[0, 1]) < 4 / math.sqrt(len(one))


def test_the_map_of_a_seed_is_always_this() -> None:
    sizes, documents = as_arrays([[3, 4, 5, 2, 6], [], [8], [2, 9, 0, 3], [5, 5, 5, 5, 5, 5]])
    mapping = build_bert_mapping(sizes, documents, 8, 9, 0.5, 1234)
    assert mapping.rows.dtype == np.uint32
    assert (mapping.epochs, mapping.left_out) == (2, 1)
    assert mapping.rows.tolist() == [
        [12, 14, 3],
        [14, 16, 9],
        [6, 10, 9],
        [0, 3, 9],
        [3, 5, 6],
        [10, 12, 8],
        [3, 5, 9],
        [10, 12, 2],
        [0, 3, 9],
        [14, 16, 9],
        [6, 10, 4],
        [12, 14, 6],
    ]


def test_sentences_beyond_32_bits() -> None:
    sizes = np.broadcast_to(np.int32(3), 2**33)
    first = 2**32 - 2
    rows = build_bert_mapping(sizes, np.array([first, first + 4, first + 8]), None, 6, 0.0, 1).rows
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == [[first + i, first + i + 2, 6] for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("corpus", [[[]], [[], []], [[5]], [[0, 0, 0]], [[0, 4], [], [3, 0]]])
def test_nothing_to_pair_gives_no_samples(corpus: list[list[int]]) -> None:
    sizes, documents = as_arrays(corpus)
    mapping = build_bert_mapping(sizes, documents, 100, 10, 0.1, 1)
    assert mapping.rows.shape == (0, 3)
    assert mapping.left_out == sum(sum(size > 0 for size in document) == 1 for document in corpus)


def test_no_documents_at_all() -> None:
    mapping = build_bert_mapping(np.array([4, 4], np.int32), np.array([1]), None, 10, 0.1, 1)
    assert mapping.rows.shape == (0, 3)


def calls_made(documents: int) -> int:
    """Python and C functions that are called to map so many documents."""
    sizes, boundaries = a_corpus(documents)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        build_bert_mapping(sizes, boundaries, None, 30, 0.1, 1)
    finally:
        sys.setprofile(None)
    return calls


def test_work_in_python_does_not_grow_with_the_documents() -> None:
    assert calls_made(40_000) < 1.5 * calls_made(4_000)


def test_the_hash_is_splitmix64() -> None:
    # first outputs of the published generator from the seeds 0 and 1234567
    assert hashed(np.arange(2), 0).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert hashed(np.arange(3), 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_are_always_these() -> None:
    draws = Draws(1234, 5)
    bits = np.random.Philox(np.random.SeedSequence([1234, 5])).random_raw(8)
    assert draws.bits(2).tolist() == bits[:2].tolist()
    assert draws.uniform(2).tolist() == [int(word >> np.uint64(11)) / 2**53 for word in bits[2:4]]
    assert draws.below(1000) == int(bits[4]) * 1000 // 2**64
    assert draws.order(3).tolist() == sorted(range(3), key=bits[5:].tolist().__getitem__)


@given(st.integers(1, 10**6), st.integers(-(2**63), 2**70))
def test_draws_stay_below_their_limit(limit: int, name: int) -> None:
    assert 0 <= Draws(name).below(limit) < limit
