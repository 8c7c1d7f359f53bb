"""What is saved comes back bit for bit, whole or in parts, and the files are what other readers expect."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from megatron.checkpointing import load_checkpoint, read_state, reader, save, save_checkpoint, writer
from megatron.checkpointing.checksum import crc32
from megatron.mpu.sharding import Sharding

LAYOUT = {"tensor": 1, "data": 1}
Placed = dict[str, tuple[Tensor, Sharding]]


def whole(tensors: dict[str, Tensor]) -> Placed:
    return {name: (t, Sharding(name, tuple(t.shape), None, 0)) for name, t in tensors.items()}


def save_alone(directory: Path, tensors: Placed, iteration: int = 10, **changes: Any) -> Path:
    arguments: dict[str, Any] = {"state": {}, "rank_tensors": {}, "layout": LAYOUT}
    return save_checkpoint(directory, iteration, tensors, **{**arguments, **changes}, rank=0, world_size=1)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of any bit pattern: NaNs with payloads, infinities and denormals too."""
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, dtypes and all bytes are equal."""
    pair = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*pair)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("block_bytes", [8, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int
) -> None:
    monkeypatch.setattr(save, "BLOCK_BYTES", block_bytes)
    for module in (reader, writer):
        monkeypatch.setattr(module, "CHUNK_BYTES", 24)
    shapes = {"scalar": (), "empty": (0, 3), "vector": (17,), "matrix": (5, 7), "cube": (2, 3, 5)}
    tensors = {name: random_bits(shape, dtype) for name, shape in shapes.items()}
    tensors["transposed"] = random_bits((6, 4), dtype).t()
    save_alone(tmp_path, whole(tensors))
    loaded = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(tmp_path, whole(loaded), rank=0, layout=LAYOUT)
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_state_and_rank_tensors(tmp_path: Path) -> None:
    own = {"rng.cpu": torch.get_rng_state(), "none": torch.empty(0), "flags": torch.tensor([True, False])}
    state = {"lr": 0.1 + 0.2, "best": math.inf, "names": ["a", "b"], "big": 2**70}
    save_alone(tmp_path, {}, state=state, rank_tensors=own)
    loaded = load_checkpoint(tmp_path, {}, rank=0, layout=LAYOUT)
    assert (loaded.iteration, loaded.state, loaded.layout) == (10, state, LAYOUT)
    assert loaded.rank_tensors is not None and loaded.rank_tensors.keys() == own.keys()
    assert all(same_bits(loaded.rank_tensors[name], tensor) for name, tensor in own.items())
    assert read_state(tmp_path) == state


def test_rank_tensors_only_at_the_same_layout(tmp_path: Path) -> None:
    save_alone(tmp_path, {}, rank_tensors={"rng": torch.ones(3)})
    assert load_checkpoint(tmp_path, {}, rank=0, layout={"tensor": 2, "data": 1}).rank_tensors is None


def test_the_latest_and_an_earlier_iteration(tmp_path: Path) -> None:
    for iteration in (10, 20):
        save_alone(tmp_path, whole({"w": torch.full((3,), float(iteration))}), iteration)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "20"
    target = torch.zeros(3)
    assert load_checkpoint(tmp_path, whole({"w": target}), rank=0, layout=LAYOUT).iteration == 20
    assert target.tolist() == [20.0] * 3
    assert load_checkpoint(tmp_path, whole({"w": target}), rank=0, layout=LAYOUT, iteration=10).iteration == 10
    assert target.tolist() == [10.0] * 3


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    save_alone(tmp_path, whole({"w": torch.zeros(3)}))
    folder = save_alone(tmp_path, whole({"w": torch.ones(3)}))
    target = torch.zeros(3)
    load_checkpoint(tmp_path, whole({"w": target}), rank=0, layout=LAYOUT)
    assert target.tolist() == [1.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "latest_checkpointed_iteration.txt"]


def test_the_checksum_is_that_of_zlib() -> None:
    content = random_bits((3001,), torch.uint8).numpy().data
    assert crc32(content) == zlib.crc32(content)
    assert crc32(content[1000:], crc32(content[:1000])) == zlib.crc32(content)


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    source, target = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    save_alone(tmp_path, whole({"w": source}))
    pointer = target.data_ptr()
    load_checkpoint(tmp_path, whole({"w": target}), rank=0, layout=LAYOUT)
    assert torch.equal(source, target) and target.data_ptr() == pointer
    assert target.requires_grad and target.is_leaf


def test_names_to_skip_are_left_unread(tmp_path: Path) -> None:
    save_alone(tmp_path, whole({"w": torch.ones(3), "optimizer.exp_avg.w": torch.ones(3)}))
    target = torch.zeros(3)
    load_checkpoint(tmp_path, whole({"w": target}), rank=0, layout=LAYOUT, skip=["optimizer."])
    assert target.tolist() == [1.0] * 3


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    data=st.data(),
    partitions=st.integers(1, 4),
    stride=st.integers(1, 2),
    block_bytes=st.sampled_from([8, 16, 40, 4096]),
    chunk_bytes=st.sampled_from([8, 24, 4096]),
)
def test_any_part_of_a_tensor_can_be_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    data: st.DataObject,
    partitions: int,
    stride: int,
    block_bytes: int,
    chunk_bytes: int,
) -> None:
    """Saved whole; each of several ranks loads its chunks, with padding at the end where it does not divide."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.randn(shape)
    directory = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "BLOCK_BYTES", block_bytes)
        patch.setattr(reader, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(writer, "CHUNK_BYTES", chunk_bytes)
        save_alone(directory, whole({"w": tensor}))
        chunk = -(-shape[dim] // (partitions * stride))
        padded = torch.zeros([chunk * partitions * stride if i == dim else n for i, n in enumerate(shape)])
        padded[tuple(slice(0, n) for n in shape)] = tensor
        chunks = padded.split(chunk, dim)
        for rank in range(partitions):
            expected = torch.cat(chunks[rank::partitions], dim)
            target = torch.full_like(expected, 7.0)
            sharding = Sharding("w", shape, dim, rank * chunk, stride, partitions)
            load_checkpoint(directory, {"w": (target, sharding)}, rank=rank, layout={"tensor": partitions})
            assert torch.equal(target, expected)


def test_only_blocks_that_are_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage in a block that no wanted row touches does not stop the load of the others."""
    monkeypatch.setattr(save, "BLOCK_BYTES", 64)
    tensor = torch.randn(16, 16)  # a row is one block
    folder = save_alone(tmp_path, whole({"w": tensor}))
    file = folder / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    upper, lower = torch.zeros(8, 16), torch.zeros(8, 16)
    two = {"tensor": 2}
    load_checkpoint(tmp_path, {"w": (upper, Sharding("w", (16, 16), 0, 0, 1, 2))}, rank=0, layout=two)
    assert torch.equal(upper, tensor[:8])
    with pytest.raises(ValueError, match=r"rank_00000\.safetensors: tensor w does not match its checksum"):
        load_checkpoint(tmp_path, {"w": (lower, Sharding("w", (16, 16), 0, 8, 1, 2))}, rank=1, layout=two)


def test_the_file_is_safetensors_and_the_index_describes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "BLOCK_BYTES", 32)
    tensors = {"a.weight": torch.randn(5, 3), "half": torch.randn(7).bfloat16(), "steps": torch.arange(3)}
    folder = save_alone(tmp_path, whole(tensors), rank_tensors={"rng": torch.arange(5, dtype=torch.uint8)})
    assert folder == tmp_path / "iter_0000010"
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", "rank_00000.safetensors", "state.json"]
    index = json.loads((folder / "index.json").read_text())
    with safe_open(str(folder / "rank_00000.safetensors"), "pt") as stored:
        assert set(stored.keys()) == {"a.weight@0,0", "half@0", "steps@0", "rank0:rng@0"}
        assert torch.equal(stored.get_tensor("a.weight@0,0"), tensors["a.weight"])
        assert torch.equal(stored.get_tensor("half@0"), tensors["half"])
        assert torch.equal(stored.get_tensor("steps@0"), tensors["steps"])
    entry = index["tensors"]["a.weight"]
    content = tensors["a.weight"].numpy().tobytes()
    checksums = [zlib.crc32(content[:32]), zlib.crc32(content[32:])]
    piece = {"file": "rank_00000.safetensors", "offset": [0, 0], "shape": [5, 3], "crc32": checksums}
    assert entry == {"dtype": "float32", "shape": [5, 3], "pieces": [piece]}
    assert index["block_bytes"] == 32 and index["iteration"] == 10 and index["layout"] == LAYOUT


def test_blocks_of_64_mebibytes_by_default() -> None:
    assert save.BLOCK_BYTES == 64 * 1024 * 1024


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(save.SaveError, match="complex64"):
        save_alone(tmp_path, whole({"w": torch.ones(2, dtype=torch.complex64)}))
    assert list(tmp_path.iterdir()) == []
