"""Classic checkpoints that Megatron-LM 2.5 itself wrote: its losses again, and the rest of its training."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing.convert import from_native, native_logits
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import reporting, run_pretrain
from tools import convert_checkpoint

# Its program padded 257 tokens to 512 and counted the padding in the loss: 512 real tokens are the same to ours.
REAL, PADDED = 257, 512


def converted(shared: Path, folder: Path, *words: str) -> Path:
    source = shared / "data" / "megatron_2_5" / "gpt_tp2_ckpt"
    asked = ["--from", "megatron", "--to", "native", "--load", str(source), "--save", str(folder), *words]
    assert convert_checkpoint.main(asked) == 0
    return folder


def recorded(shared: Path) -> tuple[Tensor, Tensor, Tensor]:
    with np.load(shared / "data" / "megatron_2_5" / "gpt_tp2_eval10.npz", allow_pickle=False) as arrays:
        tokens, labels, losses = (torch.from_numpy(arrays[name]) for name in ("tokens", "labels", "loss"))
    return tokens.flatten(0, 1).long(), labels.flatten(0, 1).long(), losses.flatten(0, 1)


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def test_recorded_losses(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, labels, losses = recorded(shared)
    ours = native_logits(converted(shared, tmp_path / "padded", "--vocab-size", str(PADDED), "--check"), tokens)
    assert_close(losses_of(ours, labels), losses, 1e-5)
    assert_close(losses_of(ours, labels).mean(), 5.926250, 1e-6)
    assert "52 x exp_avg_sq" in capsys.readouterr().out
    # Without the padding rows the logits of the real tokens are the same, and the losses lack the padding columns.
    real = native_logits(converted(shared, tmp_path / "real", "--vocab-size", str(REAL), "--check"), tokens)
    assert "255 padding rows left out" in capsys.readouterr().out
    assert torch.equal(real, ours[..., :REAL])
    assert (losses_of(real, labels) < losses - 0.1).all()


@pytest.mark.parametrize("version", [0, 1.0])
def test_older_orders_of_query_key_and_value(shared: Path, tmp_path: Path, version: float) -> None:
    """A copy whose rows stand as the older versions had them becomes the same checkpoint, moments included."""
    source, old = shared / "data" / "megatron_2_5" / "gpt_tp2_ckpt", tmp_path / "old"
    shutil.copytree(source, old)
    for path in sorted(old.rglob("model_optim_rng.pt")):
        path.chmod(0o644)
        record = torch.load(path, weights_only=False)
        if version:
            record["checkpoint_version"] = version
        else:
            del record["checkpoint_version"]
        encoder = record["model"]["language_model"]["encoder"]
        moved = [name for name in encoder if "query_key_value" in name]
        states = record["optimizer"]["state"]
        tensors = [encoder[name] for name in moved]
        tensors += [
            state[kind] for state in states.values() for kind in ("exp_avg", "exp_avg_sq") if len(state[kind]) == 48
        ]
        assert len(tensors) == 8 * 3
        for tensor in tensors:
            apart = tensor.clone().unflatten(0, (2, 3, 8))  # heads, parts, values
            tensor.copy_((apart.transpose(1, 2) if version else apart.transpose(0, 1)).flatten(0, 2))
        torch.save(record, path)
    asked = ["--from", "megatron", "--to", "native", "--load", str(old), "--vocab-size", str(PADDED), "--check"]
    assert convert_checkpoint.main([*asked, "--save", str(tmp_path / "ours")]) == 0
    mine, theirs = from_native(tmp_path / "ours"), from_native(converted(shared, tmp_path / "new", *asked[6:]))
    assert len(theirs.tensors) == 3 * 52
    for name, tensor in theirs.tensors.items():
        assert torch.equal(mine.tensors[name].read(), tensor.read()), name


@pytest.mark.parametrize("size", [1, 2])
def test_the_rest_of_the_training(
    ranks: Ranks, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """Resumed from iteration 5 with the flags that are printed, with optimizer, schedule and order of the data."""
    data = shared / "data" / "megatron_2_5"
    converted(shared, tmp_path / "ours", "--ckpt-step", "5", "--vocab-size", str(PADDED))
    words = [
        word for line in capsys.readouterr().out.splitlines() if line.startswith("  --") for word in shlex.split(line)
    ]
    words[words.index("--data-path") + 1] = str(data / "tr_text_document")
    more = ["--tensor-model-parallel-size", str(size), "--distributed-backend", "gloo", "--log-interval", "1"]
    outcome = reporting(ranks(size, run_pretrain, [*words, *more, "--data-cache-path", str(tmp_path / "cache")]))
    rest = json.loads((data / "gpt_tp2_curve.json").read_text(encoding="utf-8"))["train"][5:]
    assert_close(outcome.series("loss"), [step["lm_loss"] for step in rest], 1e-5)
    assert_close(outcome.series("grad-norm"), [step["grad_norm"] for step in rest], 1e-3)
