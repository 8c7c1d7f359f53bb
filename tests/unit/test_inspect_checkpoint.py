"""tools/inspect_checkpoint.py: what it shows, that it finds damage wherever it lies, and differences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import save, save_checkpoint
from megatron.checkpointing.index import Index, StoredTensor
from megatron.mpu.sharding import Sharding
from tests.unit.test_checkpointing_choice import DAMAGE
from tools import benchmark_checkpoint, inspect_checkpoint

FILE = "rank_00000.safetensors"


def save_model(directory: Path, iteration: int, state: dict[str, Any] | None = None, **changes: Tensor) -> Path:
    tensors = {"a": torch.arange(12.0).view(4, 3), "optimizer.exp_avg.a": torch.zeros(4, 3), "b": torch.arange(5)}
    placed = {name: (t, Sharding(name, tuple(t.shape), None, 0)) for name, t in (tensors | changes).items()}
    own = {"rng": torch.arange(9, dtype=torch.uint8)}
    values = {"run": {"iteration": iteration}, "lr": 0.5} if state is None else state
    return save_checkpoint(directory, iteration, placed, values, own, rank=0, world_size=1, layout={"tensor": 1})


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path, 5)
    save_model(tmp_path, 10)
    (tmp_path / ".iter_0000015.tmp").mkdir()
    assert inspect_checkpoint.main([str(tmp_path), "--verify"]) == 0
    told = capsys.readouterr().out
    for words in (
        f"iter_0000010: iteration 10 (saved in {tmp_path}: 5, 10)",
        "saved at the layout: tensor 1",
        "weights: 17 elements in 2 tensors",
        "all tensors: 136 bytes in 3 tensors; 9 bytes of 1 ranks' own",
        ".iter_0000015.tmp: the leftover of an interrupted save",
        "run: iteration 10",
        "whole: every byte was read",
    ):
        assert words in told
    rows = [line.split() for line in told.splitlines()]
    assert ["a", "float32", "[4,", "3]", "48", "1"] in rows and ["b", "int64", "[5]", "40", "1"] in rows
    assert inspect_checkpoint.main([str(tmp_path), "--ckpt-step", "5"]) == 0
    assert f"iteration 5 (saved in {tmp_path}: 5, 10)" in capsys.readouterr().out


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    DAMAGE[name](save_model(tmp_path, 15))
    assert inspect_checkpoint.main([str(tmp_path), "--verify"]) == 1
    told = capsys.readouterr()
    assert "iter_0000015" in told.out + told.err
    assert "NOT WHOLE" in told.out or told.err.startswith("error: ")


def test_every_damaged_block_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tensor of many blocks, and in what belongs to a rank."""
    monkeypatch.setattr(save, "BLOCK_BYTES", 64)
    path = save_model(tmp_path, 10, w=torch.zeros(16, 16)) / FILE
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:length])
    for name, where in (("w@0,0", 3 * 64), ("w@0,0", 15 * 64 + 63), ("rank0:rng@0", 0)):
        content[length + entries[name]["data_offsets"][0] + where] ^= 1
    path.write_bytes(content)
    assert inspect_checkpoint.main([str(tmp_path)]) == 0
    assert "--verify does" in capsys.readouterr().out
    assert inspect_checkpoint.main([str(tmp_path), "--verify"]) == 1
    told = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if FILE in line]
    assert told == [
        "tensor w does not match its checksum (block 3)",
        "tensor w does not match its checksum (block 15)",
        "tensor rank0:rng does not match its checksum (block 0)",
    ]


def test_a_piece_listed_twice_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path, 10) / "index.json"
    index = Index.from_json(path.read_bytes())
    a = index.contents.tensors["a"]
    twice = StoredTensor(a.name, a.dtype, a.shape, a.pieces * 2)
    index.contents.tensors["a"] = twice  # type: ignore[index]
    path.write_text(index.to_json())
    assert inspect_checkpoint.main([str(tmp_path)]) == 1
    assert "tensor a: the pieces at [0, 0] and [0, 0] overlap" in capsys.readouterr().out


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for iteration in (5, 10):
        save_model(first, iteration, {"lr": float("nan")})
    save_model(second, 10, {"lr": float("nan")})
    assert inspect_checkpoint.main([str(first), "--diff", str(second)]) == 0
    assert "equal to " in capsys.readouterr().out
    changed = torch.arange(12.0).view(4, 3)
    changed[3, 2] += 0.25
    save_model(second, 10, {"lr": 0.25, "new": [1]}, a=changed, b=torch.arange(6), c=torch.ones(1))
    assert inspect_checkpoint.main([str(first), "--diff", str(second)]) == 1
    told = capsys.readouterr().out
    assert [line.strip() for line in told[told.index("DIFFERENT") :].splitlines()[1:]] == [
        "a: 0.25 apart at most, of values up to 11.2",
        "b: int64 [5] and int64 [6]",
        "c: only in the second",
        "state.lr: nan and 0.25",
        "state.new: None and [1]",
    ]
    assert inspect_checkpoint.main([str(first), "--diff", str(first), "--diff-step", "5"]) == 0


@pytest.mark.parametrize("layout", [{"tensor": 1}, {"tensor": 2}])
def test_what_belongs_to_a_rank_differs_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: dict[str, int]
) -> None:
    """At one layout alone: at another it is of other ranks."""
    place = {"w": (torch.ones(3), Sharding("w", (3,), None, 0))}
    for iteration, at in ((1, {"tensor": 1}), (2, layout)):
        own = {"rng": torch.full((4,), iteration, dtype=torch.uint8)}
        save_checkpoint(tmp_path, iteration, place, {}, own, rank=0, world_size=1, layout=at)
    assert inspect_checkpoint.main([str(tmp_path), "--diff", str(tmp_path), "--diff-step", "1"]) == 1
    told = capsys.readouterr().out.splitlines()
    words = "layout.tensor: 2 and 1" if layout["tensor"] == 2 else "rank0:rng: 1 apart at most, of values up to 1"
    assert [line.strip() for line in told[-1:]] == [words] and told[-2].startswith("DIFFERENT")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["absent"], "absent: there is no such folder"),
        ([".", "--diff-step", "5"], "--diff-step 5: it needs --diff"),
        ([], "arguments are required: DIR"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    assert inspect_checkpoint.main(words) == 2
    assert complaint in capsys.readouterr().err


def test_a_benchmark_of_more_tensors_than_elements_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_checkpoint.main(["--mebibytes", "1", "--tensors", "300000"]) == 2
    assert "--tensors 300000: --mebibytes 1 are 262144 elements" in capsys.readouterr().err


@pytest.mark.parametrize("cold", [False, True])
def test_the_benchmark_prints_both_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str], cold: bool) -> None:
    words = ["--mebibytes", "1", "--tensors", "3", "--rounds", "1", "--folder", str(tmp_path)]
    assert benchmark_checkpoint.main([*words, *(["--cold"] if cold else [])]) == 0
    told = capsys.readouterr().out
    for what in ("saving: ", "loading: "):
        (line,) = [line for line in told.splitlines() if line.strip().startswith(what)]
        # Of a mebibyte, on a machine that does other things besides, it may be anything.
        assert float(line.split(": ")[1].split()[0]) >= 0 and line.endswith("goal at least 0.7")
    assert list(tmp_path.iterdir()) == []
