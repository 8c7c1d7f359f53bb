"""Which checkpoint is loaded when the newest is damaged, and which ones are kept."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import (
    DamageError,
    LoadedState,
    Placed,
    iterations_to_try,
    load_checkpoint,
    load_first_whole,
    other_choice,
    save_checkpoint,
)
from megatron.mpu.sharding import Sharding

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "rank_00000.safetensors"


def save(directory: Path, iteration: int, keep_last: int | None = None) -> None:
    tensors = {name: (torch.full((6,), float(iteration)), Sharding(name, (6,), None, 0)) for name in ("a", "b")}
    save_checkpoint(
        directory, iteration, tensors, {"at": iteration}, {}, rank=0, world_size=1, layout={}, keep_last=keep_last
    )


def load(directory: Path, iteration: int, **options: object) -> LoadedState:
    """Load into tensors that are checked to be all of that iteration."""
    tensors = {name: (torch.zeros(6), Sharding(name, (6,), None, 0)) for name in ("a", "b")}
    loaded = load_checkpoint(directory, tensors, rank=0, layout={}, iteration=iteration, **options)  # type: ignore[arg-type]
    assert all((tensor == iteration).all() for tensor, _ in tensors.values())
    return loaded


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A folder with checkpoints of iterations 5, 10 and 15."""
    for iteration in (5, 10, 15):
        save(tmp_path, iteration)
    return tmp_path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing folder": shutil.rmtree,
    "missing index": lambda folder: (folder / "index.json").unlink(),
    "missing file": lambda folder: (folder / FILE).unlink(),
    "missing state": lambda folder: (folder / "state.json").unlink(),
    "cut file": lambda folder: os.truncate(folder / FILE, 300),
    "flipped byte of the values": lambda folder: flip(folder / FILE, -1),
    "flipped byte of the index": lambda folder: flip(folder / "index.json", 200),
    "flipped byte of the state": lambda folder: flip(folder / "state.json", 4),
    "unreadable file": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_stops_unless_told_to_fall_back(directory: Path, name: str) -> None:
    DAMAGE[name](directory / "iter_0000015")
    assert iterations_to_try(directory) == [15]
    with pytest.raises(DamageError, match="iter_0000015"):
        load_first_whole([15], lambda iteration: load(directory, iteration))
    assert iterations_to_try(directory, fallback=True) == [15, 10, 5]
    loaded, left_out = load_first_whole([15, 10, 5], lambda iteration: load(directory, iteration))
    assert loaded.state == {"at": 10}
    (sentence,) = left_out
    assert sentence.startswith("iteration 15 is not whole and is left out: ") and "iter_0000015" in sentence
    assert other_choice(directory, 15).endswith("such as that of iteration 10")


def test_the_newest_that_is_whole(directory: Path) -> None:
    for iteration in (15, 10):
        flip(directory / f"iter_{iteration:07d}" / FILE, -1)
    choice = iterations_to_try(directory, fallback=True)
    loaded, left_out = load_first_whole(choice, lambda iteration: load(directory, iteration))
    assert loaded.iteration == 5 and len(left_out) == 2
    flip(directory / "iter_0000005" / FILE, -1)
    with pytest.raises(DamageError, match=r"iteration 15 is not .*; iteration 10 is not .*; iteration 5 is not"):
        load_first_whole(choice, lambda iteration: load(directory, iteration))
    assert other_choice(directory, 5) == ""


def test_a_checkpoint_of_another_model_is_no_reason_to_fall_back(directory: Path) -> None:
    def refuse(state: dict[str, object], stored: object) -> Placed:
        raise ValueError(f"another model at {state['at']}")

    def load_chosen(iteration: int) -> LoadedState:
        return load_checkpoint(directory, refuse, rank=0, layout={}, iteration=iteration)

    with pytest.raises(ValueError, match="another model at 15"):
        load_first_whole([15, 10], load_chosen)


@pytest.mark.parametrize("content", ["", "ten", None])
def test_a_broken_tracker(directory: Path, content: str | None) -> None:
    (directory / TRACKER).unlink()
    if content is not None:
        (directory / TRACKER).write_text(content)
        with pytest.raises(DamageError, match=TRACKER):
            iterations_to_try(directory)
    else:
        assert iterations_to_try(directory) == []
    assert iterations_to_try(directory, fallback=True) == [15, 10, 5]


def test_an_iteration_that_is_asked_for(directory: Path) -> None:
    assert iterations_to_try(directory, 10) == [10]
    assert iterations_to_try(directory, 10, fallback=True) == [10, 5]


def test_nothing_there(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        assert iterations_to_try(directory, fallback=True) == []
    (tmp_path / TRACKER).write_text("x")
    with pytest.raises(DamageError, match="it must hold the number"):
        iterations_to_try(tmp_path, fallback=True)


def iterations(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in directory.glob("iter_*"))


def test_the_last_ones_are_kept(directory: Path) -> None:
    save(directory, 20, keep_last=3)
    assert iterations(directory) == [10, 15, 20]
    save(directory, 20, keep_last=3)  # replacing one
    assert iterations(directory) == [10, 15, 20]
    save(directory, 25, keep_last=1)
    assert iterations(directory) == [25]
    assert load(directory, 25).iteration == 25


def test_a_run_that_was_turned_back_removes_nothing_later(directory: Path) -> None:
    """From iteration 5 on again: what was saved at 10 and 15 is left, until it is replaced."""
    save(directory, 7, keep_last=1)
    assert iterations(directory) == [7, 10, 15]


def test_folders_of_others_are_not_removed(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    classic = directory / "iter_0000001" / "mp_rank_00"
    classic.mkdir(parents=True)
    (directory / "iter_0000005" / FILE).unlink()  # what is of ours counts and goes, damaged or not
    save(directory, 20, keep_last=2)
    assert iterations(directory) == [1, 15, 20] and classic.is_dir()


def test_a_checkpoint_on_another_disk_is_left_there(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A link to it stands in its place, and goes when its turn comes, or when the iteration is saved again."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for iteration in (5, 15):
        shutil.move(directory / f"iter_{iteration:07d}", elsewhere)
        (directory / f"iter_{iteration:07d}").symlink_to(elsewhere / f"iter_{iteration:07d}")
    save(directory, 15, keep_last=2)
    save(directory, 20, keep_last=2)
    assert sorted(path.name for path in directory.iterdir()) == ["iter_0000015", "iter_0000020", TRACKER]
    assert load(directory, 15).iteration == 15 and iterations(elsewhere) == [5, 15]


def test_what_cannot_be_removed_is_told(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save(directory, 20, keep_last=3)
        save(directory, 22, keep_last=4)  # which is in the way of none that follows
    assert "iter_0000005: it is to be removed, and cannot be" in caplog.text
    assert "iter_0000005.del: the leftover of an interrupted save cannot be removed" in caplog.text
    assert iterations(directory) == [10, 15, 20, 22]
    save(directory, 25, keep_last=3)
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith(".")) == []
