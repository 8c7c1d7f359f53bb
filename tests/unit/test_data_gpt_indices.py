"""Sample indices: equal to those that Megatron-LM 2.5 wrote, and to a plain loop over the stream of tokens."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import gpt_indices
from megatron.data.gpt_indices import build_gpt_indices, epochs_needed
from megatron.data.indexed import IndexedDataset

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 2)


@pytest.mark.parametrize(("name", "documents", "asked"), [("train", (0, 180), 80), ("valid", (180, 200), 96)])
def test_equal_to_megatron_2_5(shared: Path, name: str, documents: tuple[int, int], asked: int) -> None:
    folder = shared / "data/megatron_2_5"
    indexed = IndexedDataset(folder / "tr_text_document")
    found = build_gpt_indices(indexed.sizes, np.arange(*documents), asked, 32, 1234)
    for kind, actual in (("doc", found.documents), ("sample", found.samples), ("shuffle", found.shuffle)):
        file = folder / f"indexmap/tr_text_document_{name}_indexmap_{asked}ns_32sl_1234s_{kind}_idx.npy"
        expected = np.load(file)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


def test_equal_to_the_toy_of_the_reference() -> None:
    found = build_gpt_indices(np.array([3, 2, 1, 4], np.int32), np.arange(4), 5, 3, 1234)
    assert found.epochs == 2
    assert found.documents.tolist() == [2, 1, 2, 0, 0, 1, 3, 3]
    assert found.samples.tolist() == [[0, 0], [2, 0], [3, 2], [4, 2], [6, 0], [6, 3], [7, 2]]
    assert found.shuffle.tolist() == [0, 4, 3, 2, 5, 1]


def test_the_last_epoch_is_kept_apart_when_little_of_it_is_used() -> None:
    sizes = np.full(50, 10, np.int32)  # 500 tokens, 49 samples of 10 in an epoch, 99 in two
    apart = build_gpt_indices(sizes, np.arange(50), 60, 10, 7)
    assert sorted(apart.documents[:50]) == sorted(apart.documents[50:]) == list(range(50))
    assert sorted(apart.shuffle[:49]) == list(range(49))
    assert sorted(apart.shuffle[49:]) == list(range(49, 99))
    mixed = build_gpt_indices(sizes, np.arange(50), 49 + 39, 10, 7)  # 39 = int(0.8 * 49)
    assert sorted(mixed.documents[:50]) != list(range(50))
    assert sorted(mixed.shuffle[:49]) != list(range(49))


@given(st.integers(2, 50), st.integers(1, 20), st.integers(0, 200))
def test_the_number_of_epochs_is_the_least(tokens: int, seq_length: int, asked: int) -> None:
    epochs = epochs_needed(tokens, seq_length, asked)
    assert epochs >= 1
    assert (epochs * tokens - 1) // seq_length >= asked
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq_length < asked


@given(SIZES, st.integers(1, 6), st.none() | st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_each_token_of_the_stream_but_the_first_is_a_target_once(
    sizes: list[int], seq_length: int, asked: int | None, seed: int
) -> None:
    documents = np.arange(2, 2 + len(sizes))
    all_sizes = np.array([9, 9, *sizes], np.int32)  # two that are not ours in front
    found = build_gpt_indices(all_sizes, documents, asked, seq_length, seed)
    # the stream, token by token: (position in the order, offset)
    stream = [(p, o) for p, d in enumerate(found.documents.tolist()) for o in range(all_sizes[d])]
    assert sorted(found.documents.tolist()) == sorted(documents.tolist() * found.epochs)
    samples = len(found.shuffle)
    assert samples == (len(stream) - 1) // seq_length
    assert samples >= (asked or 0)
    assert [tuple(row) for row in found.samples[1:].tolist()] == stream[seq_length::seq_length][:samples]
    assert found.samples[0].tolist() == [0, 0]
    assert sorted(found.shuffle.tolist()) == list(range(samples))
    left_over = len(stream) - 1 - samples * seq_length
    assert 0 <= left_over <= seq_length - 1


def test_the_seed_decides_the_order() -> None:
    sizes = np.full(30, 5, np.int32)
    first, same, other = (build_gpt_indices(sizes, np.arange(30), 40, 4, seed) for seed in (1, 1, 2))
    assert first.documents.tolist() == same.documents.tolist() != other.documents.tolist()
    assert first.shuffle.tolist() == same.shuffle.tolist() != other.shuffle.tolist()


@given(SIZES, st.integers(1, 6), st.none() | st.integers(0, 40), st.integers(1, 5))
def test_looking_at_documents_in_chunks_changes_nothing(
    sizes: list[int], seq_length: int, asked: int | None, chunk: int
) -> None:
    documents, all_sizes = np.arange(len(sizes)), np.array(sizes, np.int32)
    whole = build_gpt_indices(all_sizes, documents, asked, seq_length, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_indices, "_CHUNK", chunk)
        chunked = build_gpt_indices(all_sizes, documents, asked, seq_length, 7)
    for name in ("documents", "samples", "shuffle"):
        np.testing.assert_array_equal(getattr(chunked, name), getattr(whole, name))
