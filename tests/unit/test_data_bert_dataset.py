"""BERT's samples: structure, order of pairs, masks within sampling error, the same everywhere, odd documents."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset, shortened
from megatron.data.indexed import IndexedDataset
from tests.harness.bert_samples import (
    CONTINUES,
    FIRST,
    IDS,
    INT32,
    MASK,
    SPECIAL,
    VOCABULARY,
    Item,
    a_corpus,
    a_dataset,
    check_item,
    digest,
    digests,
    numbered,
    plain_tokens,
    segments_of,
    within,
)
from tests.harness.token_files import write_token_files


def check_against_text(dataset: BertDataset, i: int, corpus: list[list[list[int]]], pairs: bool = True) -> None:
    """Swapped back, the segments are pieces of the sample's sentences in their order, cut between two sentences."""
    item = dataset[i]
    check_item(item, dataset.seq_length, pairs)
    first, end, target = dataset.mapping.rows[i].tolist()
    sentences = [sentence for document in corpus for sentence in document][first:end]
    text = [token for sentence in sentences for token in sentence]
    segments = segments_of(item)
    for segment in segments:  # every token is its own number: consecutive tokens are a piece of the text
        assert segment == list(range(segment[0], segment[0] + len(segment)))
        assert text[0] <= segment[0] <= segment[-1] <= text[-1]
    assert sum(map(len, segments)) == min(target, len(text))
    if pairs:
        a, b = segments
        heads = [sentence[0] for sentence in sentences if sentence][1:]
        cuts = [head for head in heads if a[-1] < head <= b[0]]
        assert cuts, "the segments share a sentence"
        if len(text) <= target:
            assert a + b == text


SIZES = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=6)


@settings(max_examples=60)
@given(SIZES, st.integers(5, 40), st.sampled_from([0.0, 0.5]), st.integers(0, 2**63), st.booleans())
def test_segments_are_the_text(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    seq_length: int,
    short_seq_prob: float,
    seed: int,
    pairs: bool,
) -> None:
    least = 2 if pairs else 1
    folder = tmp_path_factory.mktemp("bert")
    choices: dict[str, float | bool] = {"short_seq_prob": short_seq_prob, "bert_no_binary_head": not pairs}
    if not any(sum(size > 0 for size in document) >= least for document in sizes):
        with pytest.raises(ValueError, match="none of the"):
            a_dataset(folder, sizes, seq_length, seed=seed, **choices)
        return
    dataset = a_dataset(folder, sizes, seq_length, seed=seed, **choices)
    for i in range(len(dataset)):
        check_against_text(dataset, i, numbered(sizes), pairs)


def test_shares_over_ten_thousand_samples(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path, a_corpus(800), num_samples=10_000)
    n = 10_000
    maskable = masked = as_mask = kept = swapped = 0
    for i in range(n):
        item = dataset[i]
        at = item["labels"] >= 0
        plain = plain_tokens(item)
        special = np.isin(plain, list(SPECIAL))
        assert not at[: len(plain)][special].any()
        assert not at[len(plain) :].any()
        maskable += int((~special).sum())
        masked += int(at.sum())
        as_mask += int((item["tokens"][at] == MASK).sum())
        kept += int((item["tokens"][at] == item["labels"][at]).sum())
        swapped += int(item["is_random"])
        # whole words: a token that goes on with a word shares the fate of the token before it
        goes_on = np.flatnonzero(CONTINUES[plain[1:]] & ~special[:-1]) + 1
        assert (at[goes_on] == at[goes_on - 1]).all()
    assert maskable > 20 * n
    assert within(masked, maskable, 0.15)
    assert within(as_mask, masked, 0.8)
    assert within(kept, masked, 0.1)  # a random token is the right one in 1 of 60,000
    assert within(swapped, n, 0.5)


def test_pairs_are_cut_at_every_place_alike(tmp_path: Path) -> None:
    n = 2000
    dataset = a_dataset(tmp_path, [[3, 3, 0, 3, 3, 3]], num_samples=n, short_seq_prob=0.0)
    assert len(dataset) == n
    cuts = np.bincount([len(segments_of(dataset[i])[0]) for i in range(n)], minlength=16)
    assert cuts[[3, 6, 9, 12]].sum() == n
    assert all(within(int(count), n, 1 / 4) for count in cuts[[3, 6, 9, 12]])


def test_the_same_sample_in_every_process(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path, a_corpus(40))
    numbers = list(range(len(dataset)))
    here = digests(dataset, numbers)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(digests, dataset, numbers[::-1]).result()[::-1]
    assert here == there == digests(a_dataset(tmp_path, a_corpus(40)), numbers)
    assert len(set(here)) == len(here)
    assert digests(a_dataset(tmp_path, a_corpus(40), seed=1235), numbers) != here


def test_a_sample_is_always_this(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path, [[3, 4, 5, 2, 6], [2, 9, 3]], 16)
    items = [dataset[i] for i in range(len(dataset))]
    assert [item["tokens"].tolist() for item in items] == [
        [2, 4, 4, 26, 27, 28, 29, 3, 15, 16, 17, 18, 19, 20, 21, 3],
        [2, 41, 4, 43, 3, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 3],
    ]
    assert [item["labels"].tolist() for item in items] == [
        [-1, 24, 25, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1, 41, 42, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert [int(item["is_random"]) for item in items] == [1, 1]


def test_later_epochs_mask_other_tokens(tmp_path: Path) -> None:
    sizes = a_corpus(60)
    dataset = a_dataset(tmp_path, sizes, short_seq_prob=0.0, num_samples=3 * 60 * 12)
    by_row: dict[tuple[int, ...], list[Item]] = {}
    for i, row in enumerate(dataset.mapping.rows.tolist()):
        by_row.setdefault(tuple(row), []).append(dataset[i])
    assert all(len(items) == dataset.mapping.epochs >= 3 for items in by_row.values())
    masks = [len({item["labels"].tobytes() for item in items}) == len(items) for items in by_row.values()]
    assert np.mean(masks) > 0.5  # two words may be masked alike by chance
    assert all(len({digest(item) for item in items}) > 1 for items in by_row.values())


def test_samples_of_two_sets_do_not_draw_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one = a_dataset(tmp_path / "a", a_corpus(400, seed=1))
    other = a_dataset(tmp_path / "b", a_corpus(400, seed=2))
    n = min(len(one), len(other))
    assert within(sum(int(one[i]["is_random"] == other[i]["is_random"]) for i in range(n)), n, 0.5)


def test_items_own_their_arrays(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path, a_corpus(5))
    before = digest(dataset[0])
    for array in dataset[0].values():
        array[...] = 7
    assert digest(dataset[0]) == before


def test_documents_of_one_sentence_make_no_pairs_and_are_told(tmp_path: Path) -> None:
    sizes = [[5], [4, 3, 6], [], [0, 8, 0], [7, 9]]
    dataset = a_dataset(tmp_path, sizes)
    assert sorted(dataset.mapping.rows[:, 0].tolist()) == [1, 7]
    assert "2 of these documents are left out" in dataset.report()[1]
    for i in range(len(dataset)):
        check_against_text(dataset, i, numbered(sizes))


def test_documents_of_one_sentence_are_used_without_pairs(tmp_path: Path) -> None:
    sizes = [[5], [4, 3, 6], [], [0, 8, 0], [7, 9]]
    dataset = a_dataset(tmp_path, sizes, bert_no_binary_head=True, short_seq_prob=0.0)
    texts = sorted(segments_of(dataset[i])[0] for i in range(len(dataset)))
    assert texts == [sum(document, []) for document in numbered(sizes) if any(document)]
    assert len(dataset.report()) == 1
    assert not any(dataset[i]["types"].any() or dataset[i]["is_random"] for i in range(len(dataset)))


def test_all_of_a_sentence_longer_than_a_sample_is_seen_over_the_epochs(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path, [[100, 3]], 24, num_samples=600, short_seq_prob=0.0)
    seen = {token for i in range(len(dataset)) for token in plain_tokens(dataset[i]).tolist()}
    assert seen >= set(range(FIRST, FIRST + 103))
    single = a_dataset(tmp_path, [[100]], 24, num_samples=600, short_seq_prob=0.0, bert_no_binary_head=True)
    assert all(single[i]["padding_mask"].all() for i in range(50))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 60))
def test_tokens_are_taken_from_the_longer_segment(a: int, b: int, target: int) -> None:
    kept = [a, b]
    while sum(kept) > target:
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert shortened(a, b, target) == tuple(kept)
    assert min(kept) >= 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of the 2 documents of its train share has two sentences.*--split-sen"):
        a_dataset(tmp_path, [[5], [6]])
    with pytest.raises(ValueError, match="none of the 2 documents of its train share has a sentence with tokens"):
        a_dataset(tmp_path, [[0], []], bert_no_binary_head=True)
    with pytest.raises(ValueError, match="--seq-length 4: a sample for BERT takes at least 5"):
        a_dataset(tmp_path, [[5, 6]], 4)
    with pytest.raises(ConfigError) as caught:
        BertDataConfig(mask_prob=0.0, short_seq_prob=1.5)
    assert caught.value.problems == [
        "--mask-prob 0.0: it must be above 0 and at most 1",
        "--short-seq-prob 1.5: it must be at least 0 and at most 1",
    ]
    dataset = a_dataset(tmp_path, [[5, 6]])
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    with pytest.raises(IndexError):
        dataset[-1]


@pytest.mark.parametrize("bad", [VOCABULARY, -1])
def test_ids_outside_the_vocabulary_are_told(tmp_path: Path, bad: int) -> None:
    indexed = IndexedDataset(write_token_files(tmp_path / "set", [[[10, 11], [bad, 12]]], INT32))
    dataset = BertDataset(indexed, indexed.document_indices, None, 16, 1, IDS, BertDataConfig())
    with pytest.raises(
        ValueError, match=r"set: ids -?\d+ to \d+ in a sample, but the tokenizer's vocabulary has 60000"
    ):
        dataset[0]


def test_numbers_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_token_files(tmp_path / "set", [[[1, 2], [3, 4]]], 6))
    with pytest.raises(ValueError, match="float64 numbers: token ids are integers"):
        BertDataset(indexed, indexed.document_indices, None, 16, 1, IDS, BertDataConfig())


def test_torch_is_not_loaded() -> None:
    program = "import sys, megatron.data.bert_dataset; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
