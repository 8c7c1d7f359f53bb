"""Token sets put one behind another equal one that was written at once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import merging
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.merging import append_set
from tests.harness.token_files import write_token_files

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=4), max_size=4), max_size=6)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sets=st.lists(DOCUMENTS, max_size=4), together=st.integers(1, 20))
def test_equal_to_one_set(tmp_path: Path, sets: list[list[list[list[int]]]], together: int) -> None:
    write_token_files(tmp_path / "whole", [document for documents in sets for document in documents])
    with pytest.MonkeyPatch.context() as patch, IndexedWriter(tmp_path / "merged", "u2") as writer:
        patch.setattr(merging, "_TOKENS", together)
        patch.setattr(merging, "_DOCUMENTS", together)
        for i, documents in enumerate(sets):
            append_set(writer, IndexedDataset(write_token_files(tmp_path / f"part{i}", documents)))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_sequences_that_lie_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1, 2], [3]], [[4, 5]]])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    pointers = np.frombuffer(index, "<i8", 3, 34 + 12)  # a view that writes through
    pointers[:] = [6, 0, 2]
    (tmp_path / "x.idx").write_bytes(index)
    with IndexedWriter(tmp_path / "y", "u2") as writer:
        append_set(writer, IndexedDataset(prefix))
    merged = IndexedDataset(tmp_path / "y")
    assert [merged.get(i).tolist() for i in range(3)] == [[4, 5], [1], [2, 3]]
    assert merged.document_indices.tolist() == [0, 2, 3]


def test_other_element_types_are_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_token_files(tmp_path / "x", [[[1]]], 4))
    with pytest.raises(ValueError, match="x holds int32"), IndexedWriter(tmp_path / "y", "u2") as writer:
        append_set(writer, dataset)
    assert not (tmp_path / "y.idx").exists()
