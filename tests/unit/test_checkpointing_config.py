"""Flags of checkpoints, and which checkpoint a run starts from."""

import os
from pathlib import Path

import pytest

from megatron.base.complaints import ConfigError
from megatron.checkpointing import CheckpointConfig, DamageError, iterations_to_load, save_checkpoint

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
        ({"ckpt_step": -1, "load": "x"}, "--ckpt-step -1"),
        ({"ckpt_step": 5}, "--ckpt-step 5: it needs --load"),
        ({"load_fallback": True}, "--load-fallback: it needs --load"),
        ({"finetune": True}, "--finetune: it needs --load"),
        ({"load_optim": False}, "--no-load-optim: it needs --load"),
        ({"load_rng": False}, "--no-load-rng: it needs --load"),
        ({"finetune": True, "load": "x", "save": "y/../x"}, "--finetune: --save y/../x must be another folder than"),
    ],
)
def test_complaints(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointConfig(**values)  # type: ignore[arg-type]


def test_folders_may_be_absent(tmp_path: Path) -> None:
    config = CheckpointConfig(save=str(tmp_path / "new"), load=str(tmp_path / "new"), save_interval=5)
    assert not (tmp_path / "new").exists() and config.save_interval == 5


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for save, sentence in (
        (tmp_path / "file" / "x", f"{tmp_path}/file is no folder"),
        (tmp_path / "new" / "x", f"this process may not write in {tmp_path}"),
        (tmp_path, f"this process may not write in {tmp_path}"),
    ):
        config = CheckpointConfig(save=str(save))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            assert config.input_problems() == [f"--save {save}: it cannot be written, for {sentence}"]
        assert config.input_problems() == [] or "is no folder" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("values", [{}, {"finetune": True}, {"load_optim": False}])
def test_what_is_left_unread(values: dict[str, bool]) -> None:
    config = CheckpointConfig(load="x", **values)  # type: ignore[arg-type]
    assert config.loads_optimizer == (not values) and config.unread == (("optimizer.",) if values else ())


def test_nothing_to_load() -> None:
    assert iterations_to_load(CheckpointConfig()) == []


@pytest.mark.parametrize("save", [None, "elsewhere"])
@pytest.mark.parametrize("present", [False, True])
def test_a_missing_checkpoint_is_refused(tmp_path: Path, save: str | None, present: bool) -> None:
    if present:
        (tmp_path / "load").mkdir()
    config = CheckpointConfig(load=str(tmp_path / "load"), save=save and str(tmp_path / save))
    words = f"there is no checkpoint in it, for there is no {TRACKER}" if present else "there is no such folder"
    with pytest.raises(ValueError, match=f"--load .*load: {words}$"):
        iterations_to_load(config)


def test_another_folder_than_is_meant_is_told(tmp_path: Path) -> None:
    """That of one checkpoint, one that has lost its tracker, and those of others' programs."""
    for iteration in (5, 7):
        save_empty(tmp_path / "run", iteration)
    (tmp_path / "theirs" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "theirs" / TRACKER).write_text("7")
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / TRACKER).write_text("release")
    (tmp_path / "run" / TRACKER).unlink()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").touch()
    for load, words in {
        "hub": "it is a folder of Hugging Face's: tools/convert_checkpoint.py --from hf makes one of ours of it",
        "run/iter_0000007": f"it is the folder of one checkpoint, and {tmp_path}/run, around it, is to be given",
        "run": f"no {TRACKER}; --load-fallback goes on from an earlier one, such as that of iteration 7",
        "theirs": "iter_0000007: the checkpoint is one of Megatron-LM's: tools/convert_checkpoint.py --from megatron",
        "released": "no iteration but release, and so is one of Megatron-LM's: tools/convert_checkpoint.py",
    }.items():
        with pytest.raises(ValueError, match=words):
            iterations_to_load(CheckpointConfig(load=str(tmp_path / load)))
    with pytest.raises(ValueError, match="is one of Megatron-LM's"):
        iterations_to_load(CheckpointConfig(load=str(tmp_path / "theirs"), ckpt_step=7))


def test_a_run_that_is_its_own_successor_starts_afresh(tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(tmp_path / "run"), save=str(tmp_path / "x" / ".." / "run"))
    (tmp_path / "x").mkdir()
    assert iterations_to_load(config) == []
    save_empty(tmp_path / "run", 5)
    save_empty(tmp_path / "run", 7)
    assert iterations_to_load(config) == [7]


def test_a_checkpoint_saved_whole_before_the_tracker_counts(tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path))
    save_empty(tmp_path, 5)
    (tmp_path / TRACKER).unlink()
    assert iterations_to_load(config) == [5]


def test_a_tracker_without_its_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("9\n")
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path))
    with pytest.raises(ValueError, match="iter_0000009: there is no such folder"):
        iterations_to_load(config)


def test_the_candidates(tmp_path: Path) -> None:
    for iteration in (5, 7, 9):
        save_empty(tmp_path, iteration)
    load = str(tmp_path)
    assert iterations_to_load(CheckpointConfig(load=load)) == [9]
    assert iterations_to_load(CheckpointConfig(load=load, load_fallback=True)) == [9, 7, 5]
    assert iterations_to_load(CheckpointConfig(load=load, ckpt_step=7)) == [7]
    assert iterations_to_load(CheckpointConfig(load=load, ckpt_step=7, load_fallback=True)) == [7, 5]

    # One that has lost its index is left out where it is asked for by number as where the tracker names it.
    (tmp_path / "iter_0000009" / "index.json").unlink()
    for step in (None, 9):
        with pytest.raises(
            DamageError, match="iter_0000009: there is no index.json in it.*such as that of iteration 7$"
        ):
            iterations_to_load(CheckpointConfig(load=load, ckpt_step=step))
        assert iterations_to_load(CheckpointConfig(load=load, ckpt_step=step, load_fallback=True)) == [9, 7, 5]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("save", [None, "."])
def test_a_step_that_is_not_there_is_refused(tmp_path: Path, fallback: bool, save: str | None) -> None:
    """Also where the run is its own successor: it was asked for."""
    config = CheckpointConfig(
        load=str(tmp_path), ckpt_step=6, load_fallback=fallback, save=save and str(tmp_path / save)
    )
    with pytest.raises(ValueError, match=r"--ckpt-step 6: .* has no checkpoint of that iteration; there are: none"):
        iterations_to_load(config)
    save_empty(tmp_path, 5)
    with pytest.raises(ValueError, match=r"--ckpt-step 6: .* there are: 5"):
        iterations_to_load(config)


@pytest.mark.parametrize("content", ["9", "nine", None])
def test_what_the_tracker_does_not_lead_to_is_told_with_the_way_out(tmp_path: Path, content: str | None) -> None:
    save_empty(tmp_path, 5)
    (tmp_path / TRACKER).unlink()
    if content is not None:
        (tmp_path / TRACKER).write_text(content)
        with pytest.raises(ValueError, match=r"; --load-fallback goes on from .* iteration 5$"):
            iterations_to_load(CheckpointConfig(load=str(tmp_path)))
    assert set(iterations_to_load(CheckpointConfig(load=str(tmp_path), load_fallback=True))) >= {5}
