"""BERT's samples: structure, order of pairs, masks within sampling error, the same everywhere, odd documents."""

import dataclasses
import hashlib
import math
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.data import bert_build
from megatron.data.bert_build import BertData, build_bert_datasets
from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset, shortened
from megatron.data.bert_mapping import BertMapping, build_bert_mapping
from megatron.data.bert_masking import BertIds
from megatron.data.blend import BlendedDataset
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_format import HEADER_BYTES
from megatron.data.shares import Asked
from tests.harness.token_files import write_token_files

CLS, SEP, MASK, PAD = 2, 3, 4, 0
SPECIAL = frozenset({0, 1, 2, 3, 4})
FIRST = 10  # the tokens of a corpus are FIRST, FIRST+1, ...: each of them tells where it stood
VOCABULARY = 60_000
INT32 = 4
CONTINUES = np.arange(VOCABULARY) % 4 == 1
CONTINUES[:FIRST] = False
IDS = BertIds(CLS, SEP, MASK, PAD, SPECIAL, CONTINUES)
Item = dict[str, np.ndarray]


def numbered(sizes: list[list[int]]) -> list[list[list[int]]]:
    """Documents of sentences with so many tokens each, every token another id."""
    following = iter(range(FIRST, VOCABULARY))
    return [[[next(following) for _ in range(size)] for size in document] for document in sizes]


def a_corpus(documents: int, seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(1, 13, random.randint(1, 12)).tolist() for _ in range(documents)]


def a_dataset(
    folder: Path,
    sizes: list[list[int]],
    seq_length: int = 64,
    num_samples: int | None = None,
    seed: int = 1234,
    **config: float | bool,
) -> BertDataset:
    indexed = IndexedDataset(write_token_files(folder / "set_text_sentence", numbered(sizes), INT32))
    documents = indexed.document_indices
    return BertDataset(indexed, documents, num_samples, seq_length, seed, IDS, BertDataConfig(**config))


def plain_tokens(item: Item) -> np.ndarray:
    """The real tokens as they were before they were masked."""
    tokens = np.where(item["labels"] >= 0, item["labels"], item["tokens"])
    return tokens[: item["padding_mask"].sum()]


def segments_of(item: Item) -> list[list[int]]:
    """The one or two segments, unmasked, in the order of the text."""
    tokens = plain_tokens(item)
    ends = np.flatnonzero(tokens == SEP)
    segments = [tokens[1 : ends[0]].tolist()] + [tokens[ends[0] + 1 : end].tolist() for end in ends[1:]]
    return segments[::-1] if item["is_random"] else segments


def check_structure(item: Item, special: frozenset[int] = SPECIAL, pairs: bool = True) -> None:
    """What must hold of every sample, whatever the text."""
    tokens, types, labels, padding = (item[name] for name in ("tokens", "types", "labels", "padding_mask"))
    n = int(padding.sum())
    assert (padding[:n] == 1).all()
    assert not padding[n:].any()
    assert (tokens[n:] == PAD).all()
    assert (labels[n:] == -1).all()
    assert tokens[0] == CLS
    assert tokens[n - 1] == SEP
    plain = plain_tokens(item)
    ends = np.flatnonzero(plain == SEP)
    assert len(ends) == (2 if pairs else 1)
    assert (np.diff([0, *ends]) > 1).all(), "an empty segment"
    assert ((types == 1) == ((np.arange(len(types)) > ends[0]) & (padding == 1))).all()
    assert (types[: ends[0] + 1] == 0).all()
    masked = labels >= 0
    assert not set(labels[masked].tolist()) & special, "a special token masked"
    assert masked.any()


def check_item(item: Item, seq_length: int, pairs: bool = True) -> None:
    for name in ("tokens", "types", "labels", "padding_mask"):
        assert item[name].shape == (seq_length,)
        assert item[name].dtype == np.int64
    assert item["loss_mask"].dtype == np.float32
    np.testing.assert_array_equal(item["loss_mask"], item["labels"] >= 0)
    assert item["is_random"].shape == ()
    assert item["is_random"] in (0, 1)
    assert set(item) == {"tokens", "types", "labels", "loss_mask", "padding_mask", "is_random"}
    seen = item["tokens"][item["labels"] >= 0]
    assert not set(seen.tolist()) & (SPECIAL - {MASK}), "a special token as a random one"
    check_structure(item, pairs=pairs)


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


def within(count: int, trials: int, probability: float) -> bool:
    """Whether a binomial count is as near to its mean as sampling lets it be: 4 standard deviations."""
    return abs(count - trials * probability) <= 4 * math.sqrt(trials * probability * (1 - probability))


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


def digest(item: Item) -> str:
    return hashlib.sha256(b"".join(item[name].tobytes() for name in sorted(item))).hexdigest()


def digests(dataset: BertDataset, numbers: list[int]) -> list[str]:
    return [digest(dataset[i]) for i in numbers]


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


def split_sets(
    prefix: str,
    split: str,
    s: int,
    choices: BertDataConfig,
    asked: Asked,
    seed: int = 1,
    ids: BertIds = IDS,
    cache: str | None = None,
) -> tuple[BertData | None, ...]:
    config = DataConfig(seq_length=s, data_path=(prefix,), split=split, data_cache_path=cache)
    return build_bert_datasets(config, choices, num_samples=asked, seed=seed, ids=ids)


def test_split_over_documents(tmp_path: Path) -> None:
    sizes = a_corpus(50)
    indexed = IndexedDataset(write_token_files(tmp_path / "set", numbered(sizes), INT32))
    train, valid, test = split_sets(indexed.prefix, "80,20,0", 64, BertDataConfig(), (100, None, None))
    assert isinstance(train, BertDataset)
    assert isinstance(valid, BertDataset)
    assert test is None
    boundary = indexed.document_indices[40]
    assert train.mapping.rows[:, 1].max() <= boundary <= valid.mapping.rows[:, 0].min()
    assert len(train) >= 100
    assert valid.mapping.epochs == 1
    assert valid.report()[0].startswith(f"valid: {len(valid)} samples from {indexed.prefix}, 1.000 epochs of 10 docu")
    assert train.report()[0].startswith("train: 100 samples from")
    assert train.epochs(2 * len(train)) == 2 * train.mapping.epochs


def test_the_map_is_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = a_corpus(50)
    indexed = IndexedDataset(write_token_files(tmp_path / "set", numbered(corpus), INT32))
    # the same sentences, of which one has moved to the next document
    (first_document, second_document), others = corpus[:2], corpus[2:]
    moved = [first_document[:-1], first_document[-1:] + second_document, *others]
    (tmp_path / "other").mkdir()
    cut_elsewhere = IndexedDataset(write_token_files(tmp_path / "other" / "set", numbered(moved), INT32))
    np.testing.assert_array_equal(cut_elsewhere.sizes, indexed.sizes)
    built = []

    def counted(*arguments: object, **more: object) -> BertMapping:
        built.append(more)
        return build_bert_mapping(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bert_build, "build_bert_mapping", counted)

    def train_set(
        split: str = "80,20,0",
        s: int = 64,
        asked: int = 99,
        seed: int = 1,
        texts: IndexedDataset = indexed,
        **config: float | bool,
    ) -> BertDataset:
        cache = str(tmp_path / "cache")
        train, *_ = split_sets(texts.prefix, split, s, BertDataConfig(**config), (asked, 0, 0), seed, cache=cache)
        assert isinstance(train, BertDataset)
        return train

    first, second = train_set(), train_set()
    assert len(built) == 1
    numbers = list(range(len(first)))
    assert digests(first, numbers) == digests(second, numbers) == digests(pickle.loads(pickle.dumps(second)), numbers)
    assert second.report() == first.report()
    for other in (
        lambda: train_set(split="70,30,0"),
        lambda: train_set(s=65),
        lambda: train_set(asked=300),
        lambda: train_set(seed=2),
        lambda: train_set(bert_no_binary_head=True),
        lambda: train_set(short_seq_prob=0.2),
        lambda: train_set(texts=cut_elsewhere),
    ):
        before = len(built)
        other()
        assert len(built) == before + 1


def test_a_damaged_set_is_told_before_its_map_is_made(tmp_path: Path) -> None:
    """Its last sentence ends where the file ends, so that opening it finds nothing."""
    prefix = write_token_files(tmp_path / "set", numbered([[3, 4], [5, 6]]), INT32)
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[HEADER_BYTES + 4 * 4 + 8] = 200  # the offset of the second sentence
    Path(prefix + ".idx").write_bytes(index)
    with pytest.raises(ValueError, match=r"set.bin has 72 bytes, its index describes 216"):
        split_sets(prefix, "1,0,0", 16, BertDataConfig(), (9, 0, 0))


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


def test_an_empty_train_share_is_told(tmp_path: Path) -> None:
    prefix = write_token_files(tmp_path / "set", [[[5, 6], [7]]], 8)
    with pytest.raises(ValueError, match="--split 0,1,0: it leaves none of the 1 documents"):
        split_sets(prefix, "0,1,0", 16, BertDataConfig(), (1, 1, 1))


def test_a_blend_of_sets_and_sets_for_each_share(tmp_path: Path) -> None:
    """Items of a blend are those of its members; sets for each share are used whole; a blend tells what has no part."""
    corpora = {"a": a_corpus(50), "b": a_corpus(40, seed=1), "c": [[3, 4]]}
    prefixes = {name: write_token_files(tmp_path / name, numbered(sizes), INT32) for name, sizes in corpora.items()}
    words = ("3", prefixes["a"], "1", prefixes["b"], "1", prefixes["c"])
    config = DataConfig(seq_length=64, data_path=words, split="80,20,0", data_cache_path=str(tmp_path / "cache"))
    made = build_bert_datasets(config, BertDataConfig(), num_samples=(200, 20, 0), seed=1, ids=IDS)
    train, valid, _ = made
    assert isinstance(train, BlendedDataset) and isinstance(valid, BlendedDataset)
    alone = [build_alone(prefixes[name], samples, tmp_path) for name, samples in (("a", 121), ("b", 41), ("c", 41))]
    for i in range(200):
        expected = alone[train.set_numbers[i]][int(train.sample_numbers[i])]
        assert all((train[i][name] == expected[name]).all() for name in expected)
    assert "left out" in valid.report()[-1] and prefixes["c"] in valid.report()[-1]
    whole = DataConfig(seq_length=64, train_data_path=(prefixes["a"],), valid_data_path=(prefixes["b"],))
    whole = dataclasses.replace(whole, data_cache_path=str(tmp_path / "cache"))
    train, valid, test = build_bert_datasets(whole, BertDataConfig(), num_samples=(9, 9, 9), seed=1, ids=IDS)
    assert isinstance(train, BertDataset) and isinstance(valid, BertDataset) and test is None
    assert (train.documents, valid.documents) == (50, 40)


def build_alone(prefix: str, samples: int, folder: Path) -> BertDataset:
    train, *_ = split_sets(prefix, "80,20,0", 64, BertDataConfig(), (samples, 0, 0), cache=str(folder / "alone"))
    assert isinstance(train, BertDataset)
    return train


# --- the set that Megatron-LM 2.5 wrote -------------------------------------------------------------------------------


def ids_of_2_5(shared: Path) -> BertIds:
    vocabulary = (shared / "data/megatron_2_5/bert_vocab.txt").read_text(encoding="utf-8").split()
    names = {name: i for i, name in enumerate(vocabulary)}
    special = frozenset(i for name, i in names.items() if name.startswith("["))
    continues = np.array([name.startswith("##") for name in vocabulary])
    own = (names[f"[{use}]"] for use in ("CLS", "SEP", "MASK", "PAD"))
    return BertIds(*own, special_ids=special, continues_word=continues)


def test_batches_of_megatron_2_5_pass_the_same_checks(shared: Path) -> None:
    recorded = np.load(shared / "data/megatron_2_5/bert_tp2_eval10.npz")
    names = ("tokens", "types", "labels", "padding_mask")
    arrays = {name: recorded[name].reshape(-1, recorded[name].shape[-1]) for name in names}
    for i in range(len(arrays["tokens"])):
        check_structure({name: arrays[name][i] for name in names})


@pytest.mark.parametrize("pairs", [True, False])
def test_samples_of_the_set_of_megatron_2_5(shared: Path, tmp_path: Path, pairs: bool) -> None:
    ids = ids_of_2_5(shared)
    assert (ids.cls, ids.sep, ids.mask, ids.pad) == (CLS, SEP, MASK, PAD)
    assert ids.special_ids == SPECIAL
    indexed = IndexedDataset(shared / "data/megatron_2_5/bt_text_sentence")
    config = BertDataConfig(bert_no_binary_head=not pairs)
    cache = str(tmp_path)
    train, valid, _ = split_sets(indexed.prefix, "90,10,0", 64, config, (2000, 64, 0), 1234, ids, cache)
    assert isinstance(train, BertDataset)
    assert isinstance(valid, BertDataset)
    assert len(train) >= 2000
    masked = maskable = 0
    for i in range(len(train)):
        item = train[i]
        check_structure(item, pairs=pairs)
        first, end, target = train.mapping.rows[i].tolist()
        text = np.concatenate([indexed.get(sentence) for sentence in range(first, end)])
        # the tokens of this set are no special ones, but for a few: what is left of a sample is pieces of its text
        found = [token for segment in segments_of(item) for token in segment]
        assert len(found) == min(target, len(text))
        if len(text) <= target:
            assert found == text.tolist()
        masked += int((item["labels"] >= 0).sum())
        maskable += len(found)
    assert within(masked, maskable, 0.15)
    for i in range(len(valid)):
        check_structure(valid[i], pairs=pairs)


def test_torch_is_not_loaded() -> None:
    program = "import sys, megatron.data.bert_dataset; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
