"""Saves that are killed or fail at every step: the last good checkpoint always loads, and the next save works."""

import builtins
import contextlib
import errno
import io
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpointing import (
    BackgroundSaver,
    CheckpointConfig,
    SaveError,
    Saver,
    load_checkpoint,
    save_checkpoint,
)
from megatron.checkpointing.folders import complete_iterations, leftovers
from megatron.mpu.sharding import Sharding

TRACKER = "latest_checkpointed_iteration.txt"
SHARDING = Sharding("w", (64, 8), None, 0)

# Functions of `os` that change the disk, or flush it.
CHANGING = ("fsync", "fdatasync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "truncate", "ftruncate")
CHANGING += ("write", "writev", "pwrite", "pwritev")

Trial = Callable[..., int]


def fork_trials(connection: Connection) -> None:
    """A warm process that forks a child for each job, kills it after a while if told to, and tells how it ended."""
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, delay = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            try:
                function(*arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    """`trial(function, *args, delay=None) -> exit code` of a process that runs it, killed after `delay` seconds."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    parent = context.Process(target=fork_trials, args=(theirs,), daemon=True)
    parent.start()
    theirs.close()

    def run(function: Callable[..., None], *arguments: Any, delay: float | None = None) -> int:
        mine.send((function, arguments, delay))
        assert mine.poll(120)
        return mine.recv()

    yield run
    mine.close()
    parent.join(60)


def save(
    directory: Path, iteration: int, value: float, rows: int = 64, keep: int | None = None, behind: bool = False
) -> None:
    sharding = Sharding("w", (rows, 8), None, 0)
    tensors = {"w": (torch.full((rows, 8), value), sharding)}
    own = {"rng": torch.full((8,), int(value), dtype=torch.uint8)}
    if behind:
        saver = BackgroundSaver(0, 1)
        saver.start(directory, iteration, tensors, {"value": value}, own, layout={}, keep_last=keep)
        saver.close()
        return
    options: dict[str, Any] = {"layout": {}, "keep_last": keep}
    save_checkpoint(directory, iteration, tensors, {"value": value}, own, rank=0, world_size=1, **options)


def load(directory: Path, rows: int = 64, iteration: int | None = None) -> tuple[int, float]:
    """Iteration and value of the latest checkpoint or another one, which must be one of one piece."""
    target = torch.zeros(rows, 8)
    places = {"w": (target, Sharding("w", (rows, 8), None, 0))}
    loaded = load_checkpoint(directory, places, rank=0, layout={}, iteration=iteration)
    value = loaded.state["value"]
    assert (target == value).all()
    assert loaded.rank_tensors is not None and (loaded.rank_tensors["rng"] == int(value)).all()
    return loaded.iteration, value


class Steps:
    """Calls `act` before and after the chosen one of all steps that change the disk; counts them."""

    def __init__(self, chosen: int, act: Callable[[], None]) -> None:
        self.chosen = chosen
        self.act = act
        self.count = 0

    def _point(self) -> None:
        if self.count == self.chosen:
            self.count += 1
            self.act()
        else:
            self.count += 1

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._point()
            result = function(*args, **kwargs)
            self._point()
            return result

        return step

    def opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            stream = function(file, mode, *args, **kwargs)
            return WatchedStream(stream, self) if "w" in mode or "x" in mode else stream

        return step


class WatchedStream:
    """A stream whose writes are steps."""

    def __init__(self, stream: Any, steps: Steps) -> None:
        self._stream = stream
        self.write = steps.watched(stream.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "WatchedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


@contextlib.contextmanager
def watch(chosen: int, act: Callable[[], None]) -> Iterator[Steps]:
    steps = Steps(chosen, act)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, steps.watched(getattr(os, name)))
        for module in (builtins, io):
            patch.setattr(module, "open", steps.opened(open))
        yield steps


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(directory: Path, iteration: int, value: float, step: int) -> None:
    with watch(step, kill_self):
        save(directory, iteration, value, keep=1)


SAVED, HEARD = 10, 11  # exit codes


def save_and_lose_a_rank(directory: Path, rendezvous: Path, behind: bool, step: int) -> None:
    """Two ranks save, half a tensor each; one dies at a step, the other exits and tells by its code what it heard."""
    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tensors = {"w": (torch.full((32, 8), 2.0), Sharding("w", (64, 8), 0, 32 * rank, 1, 2))}
    own, options = {"rng": torch.full((8,), 2, dtype=torch.uint8)}, {"layout": {}, "tensor_rank": rank}
    with watch(step if rank else -1, kill_self):
        try:
            if behind:
                saver = BackgroundSaver(rank, 2)
                saver.start(directory, 20, tensors, {"value": 2.0}, own, **options)
                saver.wait()
            else:
                save_checkpoint(directory, 20, tensors, {"value": 2.0}, own, rank=rank, world_size=2, **options)
        except Exception:
            os._exit(HEARD)
    os._exit(SAVED)


def good_checkpoints(directory: Path) -> Path:
    """A folder with checkpoints of iterations 5 and 10."""
    save(directory, 5, 0.0)
    save(directory, 10, 1.0)
    return directory


def number_of_steps(directory: Path, iteration: int) -> int:
    """How many steps a save of `iteration` over the good checkpoints has."""
    good_checkpoints(directory)
    with watch(-1, kill_self) as steps:
        save(directory, iteration, 2.0, keep=1)
    assert steps.count > 30
    return steps.count


@pytest.mark.parametrize("iteration", [20, 10], ids=["new", "replacing"])
def test_killed_before_and_after_each_step(tmp_path: Path, trial: Trial, iteration: int) -> None:
    outcomes, good = set(), good_checkpoints(tmp_path / "good")
    for step in range(number_of_steps(tmp_path / "count", iteration)):
        directory = tmp_path / str(step)
        shutil.copytree(good, directory)
        assert trial(save_and_die, directory, iteration, 2.0, step) == -signal.SIGKILL, f"step {step}"
        found = load(directory)
        outcomes.add(found)
        assert found in {(10, 1.0), (iteration, 2.0)}, f"step {step}"
        whole = complete_iterations(directory)
        assert found == (iteration, 2.0) or whole[:2] == [5, 10], f"step {step}: nothing is removed before it is saved"
        assert [load(directory, iteration=number)[0] for number in whole] == whole
        save(directory, 30, 3.0, keep=2)
        assert load(directory) == (30, 3.0)
        newest = {f"iter_{number:07d}" for number in sorted({*whole, 30})[-2:]}
        assert {path.name for path in directory.iterdir()} == {TRACKER, *newest}, f"step {step}"
    assert outcomes == {(10, 1.0), (iteration, 2.0)}


def test_the_first_save_of_all_is_killed_at_each_step(tmp_path: Path, trial: Trial) -> None:
    """A run that is its own successor then starts afresh or from that checkpoint, and saves."""
    outcomes = set()
    for step in itertools.count():
        directory = tmp_path / str(step)
        code = trial(save_and_die, directory, 20, 2.0, step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert CheckpointConfig(load=str(directory), save=str(directory)).input_problems() == []
        outcomes.add(tuple(complete_iterations(directory)))
        assert all(load(directory, iteration=number) == (20, 2.0) for number in complete_iterations(directory))
        save(directory, 30, 3.0, keep=1)
        assert load(directory) == (30, 3.0)
        assert {path.name for path in directory.iterdir()} == {TRACKER, "iter_0000030"}
    assert outcomes == {(), (20,)}
    assert step > 30


@pytest.mark.parametrize("behind", [False, True], ids=["foreground", "behind"])
def test_a_rank_is_lost_at_each_step(
    tmp_path: Path, trial: Trial, caplog: pytest.LogCaptureFixture, behind: bool
) -> None:
    """The others hear of it, the checkpoint before is whole, what is left is told and goes with the next save."""
    good = good_checkpoints(tmp_path / "good")
    for step in itertools.count():
        directory = tmp_path / str(step)
        shutil.copytree(good, directory)
        code = trial(save_and_lose_a_rank, directory, tmp_path / f"rendezvous{step}", behind, step)
        if code == SAVED:
            break
        assert code == HEARD, f"step {step}"
        with caplog.at_level(logging.WARNING):
            assert load(directory) == (10, 1.0), f"step {step}"
        assert ".iter_0000020.tmp is the leftover of an interrupted save" in caplog.text
        caplog.clear()
        save(directory, 20, 3.0)
        assert load(directory) == (20, 3.0)
        assert leftovers(directory) == []
    assert load(directory) == (20, 2.0)
    assert step > 8


def attempt(directory: Path, iteration: int) -> str:
    """ "saved", or the message of the failure."""
    try:
        save(directory, iteration, 2.0, keep=1)
    except SaveError as error:
        return str(error)
    return "saved"


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("iteration", [20, 10, 5], ids=["new", "replacing", "turned back"])
def test_a_full_disk_at_each_step(tmp_path: Path, iteration: int) -> None:
    outcomes, good = list[str](), good_checkpoints(tmp_path / "good")
    for step in range(number_of_steps(tmp_path / "count", iteration)):
        directory = tmp_path / str(step)
        shutil.copytree(good, directory)
        before = (directory / TRACKER).read_text()
        with watch(step, fail):
            outcomes.append(attempt(directory, iteration))
        if outcomes[-1] == "saved":
            assert load(directory) == (iteration, 2.0), f"step {step}"
        else:
            assert "No space left on device" in outcomes[-1]
            assert load(directory) == (10, 1.0), f"step {step}"
            assert (directory / TRACKER).read_text() == before
            assert {path.name for path in directory.iterdir()} == {"iter_0000005", "iter_0000010", TRACKER}
        save(directory, 30, 3.0)
        assert load(directory) == (30, 3.0)
    # What cannot be removed, or flushed after the tracker has its new content, does not undo a save.
    assert len(outcomes) - outcomes.count("saved") > 25


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, trial: Trial, kills: int) -> None:
    """Saves in turn new and replacing, in the foreground and behind, with all others kept and with two kept."""
    rows = 50_000
    expected = (10, 1.0)
    save(tmp_path, *expected, rows)
    begin = time.monotonic()
    save(tmp_path, *expected, rows)
    duration = time.monotonic() - begin
    draw, amid = random.Random(4), 0
    for number in range(kills):
        iteration, value = expected[0] + draw.choice((0, 10)), float(number)
        keep, behind = draw.choice((None, 2)), draw.choice((False, True))
        code = trial(save, tmp_path, iteration, value, rows, keep, behind, delay=draw.uniform(0, 1.5 * duration))
        duration *= 0.7 if code == 0 else 1.3  # half of the saves end before they are killed, however fast the disk is
        amid += bool(leftovers(tmp_path))
        found = load(tmp_path, rows)
        assert found in {expected, (iteration, value)}
        expected = found
        for other in complete_iterations(tmp_path):
            assert load(tmp_path, rows, other)[0] == other
    assert amid > kills // 10, "kills mostly come before or after the save"


def test_all_is_flushed_before_the_name_that_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a power cut does no more than a kill: what a name stands for is on the disk before it."""
    good_checkpoints(tmp_path)
    events = list[tuple[str, Path, int | Path]]()

    def flush(descriptor: int, function: Callable[[int], None] = os.fsync) -> None:
        function(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        events.append(("flush", path, path.stat().st_size if path.is_file() else 0))

    def moved(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def move(source: Any, target: Any) -> None:
            events.append(("move", Path(target), Path(source)))
            function(source, target)

        return move

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, moved(getattr(os, name)))
    save(tmp_path, 20, 2.0, keep=1)
    new, final, tracker = tmp_path / ".iter_0000020.tmp", tmp_path / "iter_0000020", tmp_path / TRACKER
    moves = {target: at for at, (kind, target, _) in enumerate(events) if kind == "move"}
    names = {path.name for path in final.iterdir()}
    assert {"index.json", "state.json", "rank_00000.safetensors"} == names
    before = events[: moves[final]]
    assert all(("flush", new / name, (final / name).stat().st_size) in before for name in names)
    assert before[-1] == ("flush", new, 0)
    between = events[moves[final] + 1 : moves[tracker]]
    assert between[0] == ("flush", tmp_path, 0)
    assert between[1:] == [("flush", events[moves[tracker]][2], tracker.stat().st_size)]
    assert events[moves[tracker] + 1] == ("flush", tmp_path, 0)
    removed = [at for target, at in moves.items() if target.suffix == ".del"]
    assert len(removed) == 2 and min(removed) > moves[tracker] + 1


def test_leftovers_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 10, 1.0)
    (tmp_path / ".iter_0000020.tmp").mkdir()
    (tmp_path / f".{TRACKER}.0123456789ab.tmp").touch()
    (tmp_path / "notes.tmp").touch()
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
        assert ".iter_0000020.tmp is the leftover of an interrupted save" in caplog.text
        save(tmp_path, 20, 2.0)
        assert "removed .iter_0000020.tmp, the leftover of an interrupted save" in caplog.text
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000010", "iter_0000020", TRACKER, "notes.tmp"}


def refuse_to_move_into_place(patch: pytest.MonkeyPatch) -> None:
    """No temporary folder can be renamed from now on."""

    def move(source: Any, target: Any, rename: Callable[[Any, Any], None] = os.rename) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    patch.setattr(os, "rename", move)


@pytest.mark.parametrize("lost", [False, True], ids=["new", "of an iteration that the tracker names and that is lost"])
def test_a_save_that_cannot_take_its_name_is_a_failed_one(tmp_path: Path, lost: bool) -> None:
    """It is told and tried again, and nothing that is there is removed for it."""
    good_checkpoints(tmp_path)
    if lost:
        shutil.rmtree(tmp_path / "iter_0000010")
    tensors, told = {"w": (torch.full((64, 8), 2.0), SHARDING)}, list[str]()
    own = {"rng": torch.full((8,), 2, dtype=torch.uint8)}
    saver = Saver(tmp_path, 0, 1, told.append, keep_last=1, max_failed=2, saved_iteration=5)
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_move_into_place(patch)
        assert not saver.save(10, tensors, {"value": 2.0}, own, layout={})
        assert "iteration 10 could not be saved (1 in a row of --max-failed-saves 2): " in told[-1]
        assert complete_iterations(tmp_path) == ([5] if lost else [5, 10]) and leftovers(tmp_path) == []
        with pytest.raises(SaveError, match="2 in a row"):
            saver.save(10, tensors, {"value": 2.0}, own, layout={})
    assert load(tmp_path, iteration=5) == (5, 0.0)
    assert saver.save(10, tensors, {"value": 2.0}, own, layout={}) and load(tmp_path) == (10, 2.0)


def test_a_disk_that_fails_early_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that sends blocks to the disk while others are written: the fsync at the end may not be told."""
    monkeypatch.setattr("megatron.checkpointing.save.BLOCK_BYTES", 64)
    good_checkpoints(tmp_path)
    told = []

    def fail_once(descriptor: int) -> None:
        told.append(descriptor)
        if len(told) == 1:
            fail()

    monkeypatch.setattr(os, "fdatasync", fail_once)
    assert f"No space left on device: '{tmp_path}/.iter_0000020.tmp/rank_00000.safetensors'" in attempt(tmp_path, 20)
    assert load(tmp_path) == (10, 1.0)
    assert attempt(tmp_path, 20) == "saved" and len(told) > 1
