"""A folder full of hostile pickles under the names of a checkpoint: each program refuses it, and nothing in it runs."""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from tests.harness.runs import flags, write_documents
from tests.unit.test_convert_restricted import Calls
from tools import convert_checkpoint, generate_text, inspect_checkpoint

OURS = ("index.json", "state.json", "rank_00000.safetensors")
TRACKER = "latest_checkpointed_iteration.txt"
OTHERS = (".metadata", "part_00000.json", "common.pt", "model_optim_rng.pt", "mp_rank_00/model_optim_rng.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The flags of a run, and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    words = flags(write_documents(folder / "documents"), train_iters=2, lr_warmup_iters=0, eval_iters=0)
    pretrain_gpt.main([*words, "--save", str(folder / "saved")])
    return words, folder / "saved"


def programs(words: list[str], folder: Path, tmp_path: Path) -> Iterator[Callable[[], int | None]]:
    """Everything that reads a checkpoint; each returns or raises its exit code."""
    load = ["--load", str(folder)]
    for more in ([], ["--load-fallback"], ["--finetune"], ["--ckpt-step", "2"]):
        yield lambda more=more: pretrain_gpt.main([*words, *load, *more])
    yield lambda: generate_text.main([*load, "--prompt", "1 2"])
    for source in ("native", "megatron"):
        asked = ["--from", source, "--to", "hf", *load, "--save", str(tmp_path / "out")]
        yield lambda asked=asked: convert_checkpoint.main(asked)
    yield lambda: inspect_checkpoint.main([str(folder), "--verify"])


def exit_code(program: Callable[[], int | None]) -> int | str | None:
    try:
        return program()
    except SystemExit as error:
        return error.code


def hostile(marker: Path, wrapped: bool) -> bytes:
    """A pickle that makes the file `marker`, bare or as torch.save wraps it."""
    value = {"model": Calls(os.system, f"touch {marker}"), "iteration": 2}
    stream = io.BytesIO()
    torch.save(value, stream) if wrapped else pickle.dump(value, stream)
    content = stream.getvalue()
    torch.load(io.BytesIO(content), weights_only=False) if wrapped else pickle.loads(content)
    assert marker.exists(), "it does what the test relies on"
    marker.unlink()
    return content


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("names", [*([name] for name in (*OURS, TRACKER)), [*OURS, *OTHERS, TRACKER]], ids=" ".join)
def test_nothing_is_executed(
    run: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], wrapped: bool
) -> None:
    words, saved = run
    folder, marker = tmp_path / "hostile", tmp_path / "marker"
    shutil.copytree(saved, folder)
    content = hostile(marker, wrapped)
    for name in names:
        path = folder / (name if name == TRACKER else f"iter_0000002/{name}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.ljust(path.stat().st_size if path.exists() else 0, b"\0"))
    codes = [exit_code(program) for program in programs(words, folder, tmp_path)]
    assert not marker.exists()
    assert "Traceback" not in capsys.readouterr().err
    # A broken tracker is no obstacle to a run that is to take another checkpoint, or that one.
    going_on = {1, 3} if names == [TRACKER] else set()
    assert {number for number, code in enumerate(codes) if code not in (1, 2)} == going_on
