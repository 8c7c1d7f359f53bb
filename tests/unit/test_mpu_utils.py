"""Dividing sizes and tensors, in one process."""

import pytest
import torch

from megatron import mpu
from megatron.mpu.utils import ensure_divisibility


def test_divide() -> None:
    assert mpu.divide(12, 4) == 3
    ensure_divisibility(12, 4)
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        mpu.divide(12, 5)
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        ensure_divisibility(12, 5)


def test_split_along_the_last_dimension() -> None:
    x = torch.arange(24).view(2, 12)
    parts = mpu.split_tensor_along_last_dim(x, 3)
    assert [part.tolist() for part in parts] == [x[:, i : i + 4].tolist() for i in (0, 4, 8)]
    assert parts[1].data_ptr() == x[:, 4:].data_ptr()
    assert all(part.is_contiguous() for part in mpu.split_tensor_along_last_dim(x, 3, True))
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        mpu.split_tensor_along_last_dim(x, 5)


def test_vocabulary_ranges() -> None:
    ranges = [mpu.VocabUtility.vocab_range_from_global_vocab_size(24, rank, 3) for rank in range(3)]
    assert ranges == [(0, 8), (8, 16), (16, 24)]
    assert mpu.VocabUtility.vocab_range_from_per_partition_vocab_size(8, 2, 3) == (16, 24)
    with pytest.raises(ValueError, match="25 is not divisible by 3"):
        mpu.VocabUtility.vocab_range_from_global_vocab_size(25, 0, 3)


def test_flat_chunks_for_any_rank() -> None:
    x = torch.arange(24).view(4, 6)
    parts = [mpu.split_tensor_into_1d_equal_chunks(x, mpu.GroupInfo(None, rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat(parts), x.flatten())
    assert all(part.shape == (8,) for part in parts)
    assert torch.equal(mpu.gather_split_1d_tensor(x), x.flatten())
    with pytest.raises(ValueError, match="24 is not divisible by 5"):
        mpu.split_tensor_into_1d_equal_chunks(x, mpu.GroupInfo(None, 0, 5))


def test_mappings_of_one_rank_are_the_identity() -> None:
    x = torch.randn(4, 6)
    for mapping in (
        mpu.copy_to_tensor_model_parallel_region,
        mpu.reduce_from_tensor_model_parallel_region,
        mpu.scatter_to_tensor_model_parallel_region,
        mpu.gather_from_tensor_model_parallel_region,
        mpu.scatter_to_sequence_parallel_region,
        mpu.gather_from_sequence_parallel_region,
        mpu.reduce_scatter_to_sequence_parallel_region,
        mpu.all_reduce,
        mpu.all_gather_first_dim,
        mpu.reduce_scatter_first_dim,
    ):
        assert mapping(x) is x


def test_mappings_refuse_what_does_not_divide() -> None:
    x, three = torch.randn(4, 4), mpu.GroupInfo(None, 0, 3)
    with pytest.raises(ValueError, match="last dimension of size 4: .* divisible by 3"):
        mpu.scatter_to_tensor_model_parallel_region(x, three)
    with pytest.raises(ValueError, match="first dimension of size 4: .* divisible by 3"):
        mpu.scatter_to_sequence_parallel_region(x, three)
    with pytest.raises(ValueError, match="first dimension of size 4: .* 3 ranks"):
        mpu.reduce_scatter_to_sequence_parallel_region(x, three)


def test_broadcast_data_alone_gives_copies() -> None:
    data = {"tokens": torch.arange(6).view(2, 3), "mask": torch.zeros((), dtype=torch.int64), "other": torch.ones(1)}
    found = mpu.broadcast_data(["tokens", "mask"], data, torch.int64)
    assert list(found) == ["tokens", "mask"]
    assert torch.equal(found["tokens"], data["tokens"])
    assert found["mask"].shape == ()
    assert found["tokens"].data_ptr() != data["tokens"].data_ptr()
    assert mpu.broadcast_data([], None, torch.int64) == {}
    for keys, words in ((["absent"], "'absent' is not in"), (["other"], "'other' is torch.float32")):
        with pytest.raises(ValueError, match=words):
            mpu.broadcast_data(keys, data, torch.int64)
