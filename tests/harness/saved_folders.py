"""A folder with small checkpoints, and ways to spoil it, for tests of what is refused."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.mpu.sharding import Sharding

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "rank_00000.safetensors"


def placed(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Sharding]]:
    return {name: (t, Sharding(name, tuple(t.shape), None, 0)) for name, t in tensors.items()}


def model() -> dict[str, Tensor]:
    return {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5.0)}


def load(directory: Path, tensors: dict[str, Tensor] | None = None, **options: Any) -> None:
    load_checkpoint(directory, placed(tensors or model()), rank=0, layout={}, **options)


def two_checkpoints(directory: Path) -> Path:
    """A folder with two good checkpoints, of iterations 5 and 10."""
    for iteration in (5, 10):
        own = {"rng": torch.arange(9, dtype=torch.uint8)}
        save_checkpoint(directory, iteration, placed(model()), {"x": 1}, own, rank=0, world_size=1, layout={})
    load(directory)
    return directory


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def change_index(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the index and give it a fitting checksum, as a hostile hand would."""
    path = directory / "iter_0000010" / "index.json"
    body = json.loads(path.read_text())
    del body["index_crc32"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"index_crc32": zlib.crc32(text.encode()), **body}))


def entry(index: dict[str, Any], name: str = "a") -> dict[str, Any]:
    return index["tensors"][name]
