"""BERT's datasets of whole sets: their shares, blends, the map that is kept, and the set that Megatron-LM 2.5 wrote."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.data import bert_build
from megatron.data.bert_build import BertData, build_bert_datasets
from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_dataset import BertDataset
from megatron.data.bert_mapping import BertMapping, build_bert_mapping
from megatron.data.bert_masking import BertIds
from megatron.data.blend import BlendedDataset
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_format import HEADER_BYTES
from megatron.data.shares import Asked
from tests.harness.bert_samples import (
    CLS,
    IDS,
    INT32,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    a_corpus,
    check_structure,
    digests,
    numbered,
    segments_of,
    within,
)
from tests.harness.token_files import write_token_files


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
