"""The saves of a run, in the foreground and behind training: failures told, counted and tried again."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import BackgroundSaver, FailedSaves, SaveError, Saver, load_checkpoint, save
from megatron.checkpointing.folders import saved_iterations
from megatron.mpu.sharding import Sharding

PLACE = Sharding("w", (6,), None, 0)


def placed(value: float) -> dict[str, Any]:
    return {"w": (torch.full((6,), float(value)), PLACE)}


def own(value: int) -> dict[str, Any]:
    return {"rng": torch.full((3,), value, dtype=torch.uint8)}


def saved(directory: Path) -> tuple[int, float, int]:
    """Iteration, value and own value of the checkpoint there."""
    target = torch.zeros(6)
    loaded = load_checkpoint(directory, {"w": (target, PLACE)}, rank=0, layout={})
    assert loaded.rank_tensors is not None and (target == target[0]).all()
    return loaded.iteration, target[0].item(), int(loaded.rank_tensors["rng"][0])


class Gate:
    """Holds back the writing of pieces until it is opened; may then let it fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        self.failure: Exception | None = None
        write = save.write_pieces

        def held_back(*arguments: Any) -> Any:
            assert self.event.wait(60)
            if self.failure is not None:
                raise self.failure
            return write(*arguments)

        patch.setattr(save, "write_pieces", held_back)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.event.set()


def test_a_limit_of_failures() -> None:
    failures = FailedSaves(3)
    error = SaveError("rank 1: no space")
    assert failures.failed(10, error) == (
        "iteration 10 could not be saved (1 in a row of --max-failed-saves 3): rank 1: no space"
    )
    failures.succeeded()
    for iteration in (20, 30):
        failures.failed(iteration, error)
    with pytest.raises(SaveError, match=r"iteration 40 could not be saved \(3 in a row of .* 3\): rank 1: no space"):
        failures.failed(40, error)
    assert "(4 in a row" in failures.failed(50, error, limited=False)


def test_what_is_saved_is_what_was_there_when_it_began(tmp_path: Path, gate: Gate) -> None:
    saver = BackgroundSaver(0, 1)
    tensors, mine, state = placed(1.0), own(1), {"list": [1]}
    saver.start(tmp_path, 10, tensors, state, mine, layout={})
    assert saver.busy and saver.poll() is None
    tensors["w"][0].fill_(2.0)
    mine["rng"].fill_(2)
    state["list"].append(2)
    gate.event.set()
    assert saver.wait() == tmp_path / "iter_0000010"
    assert not saver.busy and saver.poll() is None and saver.wait() is None
    assert saved(tmp_path) == (10, 1.0, 1)
    saver.start(tmp_path, 20, tensors, state, mine, layout={}, keep_last=1)
    saver.close()
    assert saved(tmp_path) == (20, 2.0, 2)
    assert not (tmp_path / "iter_0000010").exists()


def test_memory_for_copies_is_kept(tmp_path: Path) -> None:
    saver = BackgroundSaver(0, 1)
    pointers = []
    for iteration in (1, 2):
        saver.start(tmp_path, iteration, placed(iteration), {}, own(iteration), layout={})
        saver.wait()
        pointers.append([buffer.data_ptr() for buffer in saver._staging._buffers.values()])
    assert pointers[0] == pointers[1] and len(pointers[0]) == 2
    assert saved(tmp_path) == (2, 2.0, 2)


def test_one_at_a_time(tmp_path: Path, gate: Gate) -> None:
    saver = BackgroundSaver(0, 1)
    saver.start(tmp_path, 10, placed(1.0), {}, {}, layout={})
    with pytest.raises(AssertionError, match="under way"):
        saver.start(tmp_path, 20, placed(1.0), {}, {}, layout={})
    gate.event.set()
    saver.close()


def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    saver = BackgroundSaver(0, 1)
    with pytest.raises(ValueError, match=r"state\.x: object"):
        saver.start(tmp_path, 10, placed(1.0), {"x": object()}, {}, layout={})
    assert not saver.busy and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_background", [False, True])
def test_failures_are_told_and_end_the_run_at_the_limit(tmp_path: Path, gate: Gate, in_background: bool) -> None:
    told: list[str] = []
    saver = Saver(tmp_path, 0, 1, told.append, in_background=in_background, max_failed=2)
    gate.event.set()

    def attempt(iteration: int, failure: Exception | None, **options: Any) -> bool:
        gate.failure = failure
        done = saver.save(iteration, placed(iteration), {}, own(iteration), layout={}, **options)
        while saver._background is not None and saver._background.busy:
            saver.poll()
        return done

    no_space = OSError(28, "No space left on device")
    attempt(10, no_space)
    assert "iteration 10 could not be saved (1 in a row of --max-failed-saves 2): OSError" in told[-1]
    assert saver.saved_iteration is None and list(tmp_path.iterdir()) == []
    assert attempt(20, None) is not in_background
    assert saver.saved_iteration == 20 and saved(tmp_path)[0] == 20
    attempt(30, no_space)
    with pytest.raises(SaveError, match=r"iteration 40 could not be saved \(2 in a row"):
        attempt(40, no_space)
    # The last one is tried whatever failed before.
    with pytest.raises(SaveError, match=f"iteration 40, .*, could not be saved to {tmp_path}: .*No space left"):
        attempt(40, no_space, last=True)
    assert attempt(40, None, last=True)
    assert saved(tmp_path)[0] == 40 and saver.saved_iteration == 40
    saver.close()


def test_the_end_waits_and_hears_of_a_failure(tmp_path: Path, gate: Gate) -> None:
    saver = Saver(tmp_path, 0, 1, print, in_background=True)
    gate.failure = OSError(28, "No space left on device")
    assert not saver.save(10, placed(1.0), {}, {}, layout={})
    saver.poll()
    threading.Timer(0.1, gate.event.set).start()
    with pytest.raises(SaveError, match="No space left"):
        saver.close()
    assert saver.saved_iteration is None


def test_the_last_one_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    told: list[str] = []
    saver = Saver(tmp_path, 0, 1, told.append, in_background=True, max_failed=1, keep_last=2)
    gate.failure = OSError(28, "No space left on device")
    saver.save(10, placed(1.0), {}, own(1), layout={})
    threading.Timer(0.1, gate.event.set).start()
    with pytest.raises(SaveError, match="No space left"):
        saver.save(20, placed(2.0), {}, own(2), layout={}, last=True)
    assert [line.split(" (")[0] for line in told[1:]] == ["iteration 10 could not be saved"]
    gate.failure = None
    assert saver.save(20, placed(2.0), {}, own(2), layout={}, last=True)
    saver.close()
    assert saved(tmp_path) == (20, 2.0, 2)


@pytest.mark.parametrize("in_background", [False, True])
def test_what_the_run_did_not_go_on_from_neither_counts_nor_is_removed(
    tmp_path: Path, gate: Gate, in_background: bool
) -> None:
    """The checkpoint of iteration 10 was damaged, say: of the last two that are kept, both are to be whole ones."""
    gate.event.set()
    begun = Saver(tmp_path, 0, 1, str)
    for iteration in (5, 10):
        begun.save(iteration, placed(1.0), {}, {}, layout={})
    kept = []
    saver = Saver(tmp_path, 0, 1, str, in_background=in_background, keep_last=2, saved_iteration=5)
    gate.failure = OSError(28, "No space left on device")
    saver.save(10, placed(1.0), {}, {}, layout={})  # which therefore takes the place of nothing
    while saver._background is not None and saver._background.busy:
        saver.poll()
    gate.failure = None
    for iteration in (20, 30, 10, 40):
        saver.save(iteration, placed(1.0), {}, {}, layout={})
        saver.save(iteration, placed(1.0), {}, {}, layout={}, last=True)  # waits
        kept.append(saved_iterations(tmp_path))
    saver.close()
    # When the run has saved one of its own there, that counts.
    assert kept == [[5, 10, 20], [10, 20, 30], [10, 20, 30], [30, 40]]


def test_nothing_is_removed_where_a_run_goes_on_from_elsewhere(tmp_path: Path) -> None:
    """Also not a checkpoint of iteration 0, as conversions make them."""
    Saver(tmp_path, 0, 1, str).save(0, placed(1.0), {}, {}, layout={})
    saver = Saver(tmp_path, 0, 1, str, keep_last=1)
    for iteration in (10, 20):
        saver.save(iteration, placed(1.0), {}, {}, layout={})
    assert saved_iterations(tmp_path) == [0, 20]


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_saved_is_not_saved_again(tmp_path: Path, in_background: bool) -> None:
    """Neither what the run went on from nor what is being written when the last save comes."""
    told: list[str] = []
    saver = Saver(tmp_path, 0, 1, told.append, in_background=in_background, saved_iteration=5)
    assert saver.save(5, placed(1.0), {}, own(1), layout={}, last=True)
    assert told == [] and list(tmp_path.iterdir()) == []
    saver.save(10, placed(1.0), {}, own(1), layout={})
    assert saver.save(10, placed(2.0), {}, own(2), layout={}, last=True)
    saver.close()
    assert saved(tmp_path) == (10, 1.0, 1)


def test_a_run_that_failed_waits_for_its_save(tmp_path: Path, gate: Gate) -> None:
    for iteration, failure in ((10, None), (20, OSError(28, "No space left on device"))):
        gate.event.clear()
        gate.failure = failure
        saver = Saver(tmp_path, 0, 1, print, in_background=True)
        saver.save(iteration, placed(iteration), {}, own(iteration), layout={})
        threading.Timer(0.1, gate.event.set).start()
        saver.abandon()
        assert saved(tmp_path)[0] == 10
        assert {path.name for path in tmp_path.iterdir()} == {"iter_0000010", "latest_checkpointed_iteration.txt"}


PROGRAM = """
import sys, torch
from megatron.checkpointing import BackgroundSaver
from megatron.mpu.sharding import Sharding
BackgroundSaver(0, 1).start(
    sys.argv[1], 10, {"w": (torch.ones(6), Sharding("w", (6,), None, 0))}, {},
    {"rng": torch.ones(3, dtype=torch.uint8)}, layout={}
)
raise SystemExit(3)
"""


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert saved(tmp_path) == (10, 1.0, 1)
