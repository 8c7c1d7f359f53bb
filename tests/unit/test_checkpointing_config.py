"""Flags of checkpoints, and which checkpoint a run starts from."""

from pathlib import Path

import pytest

from megatron.base.complaints import ConfigError
from megatron.checkpointing import CheckpointConfig, iteration_to_load, save_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"


def save_empty(directory: Path, iteration: int) -> None:
    save_checkpoint(directory, iteration, {}, {}, {}, rank=0, world_size=1, layout={})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"save_interval": 5}, "--save-interval 5: it needs --save"),
        ({"save": "x", "save_interval": 0}, "--save-interval 0"),
        ({"save": ""}, "--save '': it must be a folder"),
        ({"load": __file__}, "it must be a folder"),
    ],
)
def test_complaints(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointConfig(**values)  # type: ignore[arg-type]


def test_folders_may_be_absent(tmp_path: Path) -> None:
    config = CheckpointConfig(save=str(tmp_path / "new"), load=str(tmp_path / "new"), save_interval=5)
    assert not (tmp_path / "new").exists() and config.save_interval == 5


def test_nothing_to_load() -> None:
    assert iteration_to_load(CheckpointConfig()) is None


@pytest.mark.parametrize("save", [None, "elsewhere"])
@pytest.mark.parametrize("present", [False, True])
def test_a_missing_checkpoint_is_refused(tmp_path: Path, save: str | None, present: bool) -> None:
    if present:
        (tmp_path / "load").mkdir()
    config = CheckpointConfig(load=str(tmp_path / "load"), save=save and str(tmp_path / save))
    with pytest.raises(ValueError, match=f"--load .*load: there is no checkpoint in it, for there is no {TRACKER}"):
        iteration_to_load(config)


def test_a_run_that_is_its_own_successor_starts_afresh(tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(tmp_path / "run"), save=str(tmp_path / "x" / ".." / "run"))
    (tmp_path / "x").mkdir()
    assert iteration_to_load(config) is None
    save_empty(tmp_path / "run", 5)
    save_empty(tmp_path / "run", 7)
    assert iteration_to_load(config) == 7


def test_a_checkpoint_saved_whole_before_the_tracker_counts(tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path))
    save_empty(tmp_path, 5)
    (tmp_path / TRACKER).unlink()
    assert iteration_to_load(config) == 5


def test_a_tracker_without_its_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("9\n")
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path))
    with pytest.raises(ValueError, match="iter_0000009: there is no such folder"):
        iteration_to_load(config)
