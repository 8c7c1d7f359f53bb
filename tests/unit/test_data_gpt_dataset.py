"""GPT samples: the tokens that Megatron-LM 2.5 fed its model, the loss mask, shares that are empty or too small."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.config import DataConfig
from megatron.data.gpt_build import build_gpt_datasets
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import IndexedDataset
from tests.harness.token_files import write_token_files


def write_corpus(folder: Path, sizes: list[int], code: int = 8) -> str:
    """Documents whose tokens are counted through: 1, 2, 3, ..."""
    ends = np.cumsum(sizes)
    documents = [[list(range(int(end) - size + 1, int(end) + 1))] for end, size in zip(ends, sizes, strict=True)]
    return write_token_files(folder / "corpus", documents, code)


def test_gives_the_batches_that_megatron_2_5_evaluated(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data/megatron_2_5"
    config = DataConfig(
        data_path=(str(folder / "tr_text_document"),), split="90,10,0", seq_length=32, data_cache_path=str(tmp_path)
    )
    train, valid, test = build_gpt_datasets(config, num_samples=(80, 96, 32), seed=1234, eod_id=256)
    assert test is None
    assert train is not None
    assert valid is not None
    assert (len(train), len(valid)) == (393, 141)
    expected = np.load(folder / "gpt_tp2_eval10.npz")  # the second evaluation: samples 32 to 63
    items = [valid[i] for i in range(32, 64)]
    for name in ("tokens", "labels"):
        np.testing.assert_array_equal(np.stack([item[name] for item in items]), expected[name].reshape(32, 32))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=10).filter(lambda sizes: sum(sizes) >= 8),
    st.integers(1, 7),
    st.none() | st.integers(1, 30),
)
def test_samples_are_cut_from_the_stream(tmp_path: Path, sizes: list[int], s: int, asked: int | None) -> None:
    indexed = IndexedDataset(write_corpus(tmp_path, sizes))
    dataset = GPTDataset(indexed, range(len(sizes)), asked, s, seed=3)
    stream = np.concatenate([indexed.get(d) for d in dataset.indices.documents.tolist()]).astype(np.int64)
    for i, sample in enumerate(dataset.indices.shuffle.tolist()):
        item = dataset[i]
        assert {name: (value.dtype, value.shape) for name, value in item.items()} == {
            "tokens": (np.int64, (s,)),
            "labels": (np.int64, (s,)),
            "loss_mask": (np.float32, (s,)),
        }
        np.testing.assert_array_equal(item["tokens"], stream[sample * s : sample * s + s])
        np.testing.assert_array_equal(item["labels"], stream[sample * s + 1 : sample * s + s + 1])
        assert item["loss_mask"].all()


def test_the_end_of_a_document_foretells_nothing_when_masked(tmp_path: Path) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1, 2, 0]], [[3, 0]], [[4, 5, 6, 0]]])
    indexed = IndexedDataset(prefix)
    plain = GPTDataset(indexed, range(3), None, 8, seed=1, eod_id=0)[0]
    masked = GPTDataset(indexed, range(3), None, 8, seed=1, eod_id=0, eod_mask_loss=True)[0]
    assert plain["loss_mask"].all()
    np.testing.assert_array_equal(masked["loss_mask"], (masked["tokens"] != 0).astype(np.float32))
    assert 0 in masked["tokens"]
    np.testing.assert_array_equal(masked["labels"], plain["labels"])
    with pytest.raises(ValueError, match="--eod-mask-loss: the tokenizer has no end-of-document"):
        GPTDataset(indexed, range(3), None, 8, seed=1, eod_mask_loss=True)


def test_an_item_owns_its_arrays(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [9, 9], code=5)  # int64 in the file: nothing to convert
    before = Path(prefix + ".bin").read_bytes()
    dataset = GPTDataset(IndexedDataset(prefix), range(2), None, 4, seed=1)
    first = dataset[0]
    expected = {name: value.copy() for name, value in first.items()}
    first["tokens"][:] = -1
    np.testing.assert_array_equal(first["labels"], expected["labels"])
    np.testing.assert_array_equal(dataset[0]["tokens"], expected["tokens"])
    assert Path(prefix + ".bin").read_bytes() == before


def test_only_the_documents_of_the_share_are_read(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [10] * 10)
    config = DataConfig(data_path=(prefix,), split="6,2,2", seq_length=4)
    datasets = build_gpt_datasets(config, num_samples=(None, None, 40), seed=5, eod_id=None)
    ranges = [(1, 60), (61, 80), (81, 100)]
    for dataset, (low, high) in zip(datasets, ranges, strict=True):
        assert dataset is not None
        seen = np.concatenate([np.append(dataset[i]["tokens"], dataset[i]["labels"]) for i in range(len(dataset))])
        assert low <= seen.min() < seen.max() <= high
    assert [len(dataset) for dataset in datasets if dataset is not None] == [14, 4, 44]


def test_a_share_without_documents_or_of_which_nothing_is_asked_is_none(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [10] * 4)
    config = DataConfig(data_path=(prefix,), split="1,1,0", seq_length=4)
    train, valid, test = build_gpt_datasets(config, num_samples=(8, 0, 8), seed=5, eod_id=None)
    assert train is not None
    assert (valid, test) == (None, None)
    config = DataConfig(data_path=(prefix,), split="0,1,0", seq_length=4)
    assert build_gpt_datasets(config, num_samples=(0, 4, 4), seed=5, eod_id=None)[0] is None
    with pytest.raises(ValueError, match="--split 0,1,0: it leaves none of the 4 documents of .*corpus for training"):
        build_gpt_datasets(config, num_samples=(8, 8, 8), seed=5, eod_id=None)


def test_too_few_tokens_for_one_sample_are_told(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [10] * 4)
    config = DataConfig(data_path=(prefix,), split="3,1,0", seq_length=10)
    message = "corpus: its valid share has 1 documents with 10 tokens, .* --seq-length 10 takes 11"
    with pytest.raises(ValueError, match=message):
        build_gpt_datasets(config, num_samples=(8, 8, 0), seed=5, eod_id=None)
    config = DataConfig(data_path=(prefix,), split="1,0,0", seq_length=39)
    train = build_gpt_datasets(config, num_samples=(None, 0, 0), seed=5, eod_id=None)[0]
    assert train is not None
    assert len(train) == 1
    config = DataConfig(data_path=(prefix,), split="1,0,0", seq_length=40)
    with pytest.raises(ValueError, match="its train share has 4 documents with 40 tokens, .* takes 41"):
        build_gpt_datasets(config, num_samples=(8, 0, 0), seed=5, eod_id=None)


def test_what_cannot_be_read_is_told_with_the_flag(tmp_path: Path) -> None:
    def build(*path: str) -> None:
        build_gpt_datasets(DataConfig(data_path=path or None, seq_length=4), num_samples=(8, 0, 0), seed=5, eod_id=None)

    with pytest.raises(ValueError, match="--data-path is missing"):
        build()
    with pytest.raises(ValueError, match=r"--data-path .*nothing: .*nothing.idx is missing"):
        build(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="holds float64 numbers: token ids are integers"):
        build(write_token_files(tmp_path / "floats", [[[1, 2, 3, 4, 5, 6]]] * 40, 6))


def test_complaints_of_the_config_come_together() -> None:
    with pytest.raises(ValueError, match="--seq-length 0") as caught:
        DataConfig(data_path=("x",), seq_length=0, split="x", num_workers=-1, data_impl="lazy")
    text = str(caught.value)
    assert all(flag in text for flag in ("--split x", "--num-workers -1", "--data-impl lazy: accepted are mmap"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=9).filter(lambda d: sum(map(len, d)) >= 7),
    st.integers(1, 6),
    st.none() | st.just(0),
)
def test_documents_in_a_sample_are_told_apart(
    tmp_path: Path, texts: list[list[int]], s: int, eod_id: int | None
) -> None:
    indexed = IndexedDataset(write_token_files(tmp_path / "x", [[text] for text in texts]))
    switches = {"reset_position_ids": True, "reset_attention_mask": True}
    dataset = GPTDataset(indexed, range(len(texts)), 20, s, seed=3, eod_id=eod_id, **switches)
    # each token of the stream with the number of its document: a new one in each of the set and after each end
    numbers: list[int] = []
    for d in dataset.indices.documents.tolist():
        number = numbers[-1] + 1 if numbers else 0
        for token in texts[d]:
            numbers.append(number)
            number += token == eod_id
    for i, sample in enumerate(dataset.indices.shuffle.tolist()):
        item, mine = dataset[i], numbers[sample * s : sample * s + s]
        runs = [len(list(group)) for _, group in itertools.groupby(mine)]
        assert item["document_lengths"].dtype == np.int32
        assert item["document_lengths"].tolist() == runs + [0] * (s - len(runs))
        assert item["position_ids"].tolist() == [k for run in runs for k in range(run)]


def test_what_is_not_asked_for_is_not_in_an_item(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_corpus(tmp_path, [9, 9]))
    plain = {"tokens", "labels", "loss_mask"}
    assert set(GPTDataset(indexed, range(2), None, 4, seed=1)[0]) == plain
    positions = GPTDataset(indexed, range(2), None, 4, seed=1, reset_position_ids=True)
    assert set(positions[0]) == plain | {"position_ids"}
    attention = GPTDataset(indexed, range(2), None, 4, seed=1, reset_attention_mask=True)
    assert set(attention[0]) == plain | {"document_lengths"}
