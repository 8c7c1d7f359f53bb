"""What a save or a load costs beside the tensors: memory of at most one block, and reading of no block in vain."""

import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.base.rectangles import Rectangle
from megatron.checkpointing import BackgroundSaver, load_checkpoint, save, save_checkpoint
from megatron.checkpointing.checksum import CHUNK_BYTES
from megatron.checkpointing.writer import NewPiece, write_pieces
from megatron.mpu.sharding import Sharding

BLOCK = 16 * 2**20
ROWS, COLUMNS = 2048, 4096  # of float32: two blocks
# Buffers, threads, index and all else that does not grow with tensors or blocks.
SMALL = 4 * 2**20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells what a process takes and reads"
)

Costs = dict[str, int]


def own_number(path: str, name: str) -> int:
    """A number that the kernel tells of this process."""
    found = re.search(rf"^{name}:\s*(\d+)", Path("/proc/self", path).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@contextlib.contextmanager
def noted(costs: Costs, name: str) -> Iterator[None]:
    """Notes the bytes by which the memory of this process grows at most in the block, and those that it reads."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    memory, read = own_number("status", "VmHWM"), own_number("io", "rchar")
    yield
    costs[name] = 1024 * (own_number("status", "VmHWM") - memory)
    costs[f"{name}: read"] = own_number("io", "rchar") - read


def whole(tensors: dict[str, Tensor]) -> Any:
    return {name: (t, Sharding(name, tuple(t.shape), None, 0)) for name, t in tensors.items()}


def tensors_of(kind: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(ROWS, COLUMNS, generator=draw) for name in ("a", "optimizer.b")}
    return {name: t.t() for name, t in tensors.items()} if kind == "transposed" else tensors


def measured(directory: Path, kind: str) -> Costs:
    """A process of its own saves two tensors of two blocks each, and loads them in several ways."""
    torch.set_num_threads(1)
    save.BLOCK_BYTES = BLOCK
    costs: Costs = {}
    tensors, one = tensors_of(kind), whole({"c": torch.ones(1)})
    for iteration, what in ((1, one), (2, whole(tensors))):  # the first for what is made only once
        with noted(costs, "save"):
            save_checkpoint(directory, iteration, what, {}, {}, rank=0, world_size=1, layout={})
        with noted(costs, "load"):
            load_checkpoint(directory, what, rank=0, layout={})
    saver = BackgroundSaver(0, 1)
    with noted(costs, "save behind"):
        saver.start(directory, 3, whole(tensors), {}, {}, layout={})
        saver.close()
    shape = tuple(tensors["a"].shape)
    rows, columns = torch.zeros(shape[0] // 2, shape[1]), torch.zeros(shape[0], shape[1] // 2)
    for name, part, dim in (("rows", rows, 0), ("columns", columns, 1)):
        sharding = Sharding("a", shape, dim, part.shape[dim], 1, 2)
        with noted(costs, name):
            load_checkpoint(directory, {"a": (part, sharding)}, rank=0, layout={}, skip=["optimizer."])
        assert torch.equal(part, tensors["a"].chunk(2, dim)[1])
    return costs


@pytest.mark.parametrize("kind", ["whole", "transposed"])
def test_one_block_is_held_and_only_what_is_wanted_is_read(tmp_path: Path, kind: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        costs = pool.apply(measured, (tmp_path, kind))
    held = BLOCK if kind == "transposed" else 0  # contiguous values are written from where they are
    everything = 2 * 4 * ROWS * COLUMNS
    assert costs["save"] <= held + SMALL
    assert costs["load"] <= held + SMALL
    assert abs(costs["save behind"] - everything) <= SMALL  # the staging copy
    assert everything <= costs["load: read"] <= everything + SMALL
    # What is not contiguous where it goes is read into a chunk, by each thread that reads: two blocks are two threads.
    for part, blocks, chunks in (("rows", 1, 0), ("columns", 2, 2)):
        assert costs[part] <= chunks * CHUNK_BYTES + SMALL
        assert blocks * BLOCK <= costs[f"{part}: read"] <= blocks * BLOCK + SMALL


def in_page_cache(path: Path) -> int:
    """The bytes of a file that the system holds in memory."""
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_a_save_leaves_the_page_cache_to_others(tmp_path: Path) -> None:
    if shutil.which("fincore") is None:
        pytest.skip("there is no fincore here, which tells what of a file is in memory")
    block, plain = 2**20, tmp_path / "plain"
    plain.write_bytes(bytes(4 * block))
    with open(plain, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_page_cache(plain) > 0:
        pytest.skip(f"{tmp_path} is in memory, where files are nowhere else")
    values = torch.arange(8 * block, dtype=torch.float32)
    (tmp_path / "saved").mkdir()
    write_pieces(tmp_path / "saved" / "f", [NewPiece("t", Rectangle.whole(values.shape), values)], block)
    assert in_page_cache(tmp_path / "saved" / "f") < 4 * block
    assert torch.equal(load_file(tmp_path / "saved" / "f")["t@0"], values)
