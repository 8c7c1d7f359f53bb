"""Saves behind training and falls back of several ranks: all hear the same at the same call."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpointing import (
    BackgroundSaver,
    LoadedState,
    SaveError,
    Saver,
    iterations_to_try,
    load_checkpoint,
    load_first_whole,
    save,
    save_checkpoint,
)
from megatron.mpu.sharding import Sharding
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

LAYOUT = {"data": 2}


def half(rank: int, value: float) -> dict[str, Any]:
    return {"w": (torch.full((4,), float(value)), Sharding("w", (8,), 0, 4 * rank, 1, 2))}


def own(rank: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.full((9,), rank, dtype=torch.uint8)}


def load_half(directory: Path, rank: int, iteration: int | None = None) -> LoadedState:
    """Load this rank's half, which is checked to be of the iteration."""
    wanted = half(rank, -1.0)
    loaded = load_checkpoint(directory, wanted, rank=rank, layout=LAYOUT, iteration=iteration, world_size=2)
    assert (wanted["w"][0] == loaded.iteration).all()
    return loaded


def slow_on_one(rank: int, world_size: int, directory: str) -> list[str]:
    """Rank 1 writes slowly, then fails, while both train, which is all-reduces over the group of all ranks."""
    write, told = save.write_pieces, list[str]()
    failure: list[Exception] = []

    def slow(*arguments: Any) -> Any:
        if rank == 1:
            time.sleep(0.3)
            if failure:
                raise failure[0]
        return write(*arguments)

    saver = Saver(directory, rank, world_size, told.append, in_background=True, max_failed=2)
    ended_at = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_pieces", slow)
        for iteration in (10, 20, 30):
            if iteration == 20:
                failure.append(OSError(28, "No space left on device"))
            tensors = half(rank, iteration)
            saver.save(iteration, tensors, {}, own(rank), layout=LAYOUT, tensor_rank=rank)
            tensors["w"][0].zero_()
            polls = 0
            try:
                while saver._background is not None and saver._background.busy:
                    step = torch.tensor(float(rank))
                    dist.all_reduce(step)
                    assert step.item() == 1.0
                    polls += 1
                    saver.poll()
            except SaveError as error:
                told.append(f"raised: {error}")
            ended_at.append(polls)
    saver.close()
    assert load_half(Path(directory), rank).iteration == 10
    assert [line.split(" to ")[0] for line in told[::2]] == [f"iteration {n} is being written" for n in (10, 20, 30)]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, ended_at)
    assert gathered[0] == gathered[1], "all ranks hear of it at the same step"
    return told[1::2]


def test_all_ranks_hear_of_an_end_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, slow_on_one, str(tmp_path))
    assert first == second
    assert first[0] == f"iteration 10 is saved now, to {tmp_path / 'iter_0000010'}"
    assert first[1].startswith("iteration 20 could not be saved (1 in a row of --max-failed-saves 2): rank 1: OSError")
    assert first[2].startswith("raised: iteration 30 could not be saved (2 in a row")


def count_polls(rank: int, world_size: int, directory: str) -> None:
    saver = BackgroundSaver(rank, world_size)
    with CollectiveCounter() as counter:
        assert saver.poll() is None
    assert counter.calls == []
    saver.start(directory, 10, half(rank, 10), {}, {}, layout=LAYOUT, tensor_rank=rank)
    assert saver.wait() == Path(directory, "iter_0000010")
    saver.close()


def test_nothing_is_exchanged_while_nothing_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, count_polls, str(tmp_path))


def fall_back_together(rank: int, world_size: int, directory: str) -> tuple[int, list[str]]:
    """Only rank 1 meets the damage, which lies in its own tensors."""
    root = Path(directory)
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "layout": LAYOUT, "tensor_rank": rank}
    for iteration in (5, 10):
        save_checkpoint(root, iteration, half(rank, iteration), {}, own(rank), **options)
    if rank == 0:
        path = root / "iter_0000010" / "rank_00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    choice = iterations_to_try(root, fallback=True)
    loaded, left_out = load_first_whole(choice, lambda iteration: load_half(root, rank, iteration))
    return loaded.iteration, left_out


def test_all_ranks_fall_back_together(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, fall_back_together, str(tmp_path))
    assert first == second
    assert first[0] == 5
    assert "rank 1: " in first[1][0] and "tensor rank1:rng does not match its checksum" in first[1][0]
