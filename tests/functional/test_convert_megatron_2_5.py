"""Classic checkpoints that Megatron-LM 2.5 itself wrote: its losses again, and the rest of its training."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain_gpt
from megatron.checkpointing import read_state
from megatron.checkpointing.convert import from_native, native_logits
from megatron.model import Chunk
from megatron.training.pipeline import Batch
from tests.harness.classic_files import Layout, Progress, vars_of, write_classic
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, reporting, run_pretrain
from tools import convert_checkpoint

# Its program padded 257 tokens to 512, and trained the padding and counted it in the loss.
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
    padded = converted(shared, tmp_path / "padded", "--vocab-size", str(REAL), "--keep-padding", "--check")
    ours = native_logits(padded, tokens)
    assert ours.shape[-1] == PADDED
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


def test_the_same_run_at_other_layouts(shared: Path, tmp_path: Path) -> None:
    """Written down as its program lays it out elsewhere, it becomes the same checkpoint.

    That the writer does as the program did is shown at the layout that there is: the files hold the same.
    """
    told = ["--vocab-size", str(REAL), "--keep-padding"]
    ours = from_native(converted(shared, tmp_path / "ours", *told))
    whole = {name: tensor.read() for name, tensor in ours.tensors.items()}
    weights = {name: whole[name] for name in ours.weights}
    moments = {
        kind: {name: whole[f"optimizer.{kind}.{name}"] for name in weights} for kind in ("exp_avg", "exp_avg_sq")
    }
    theirs = [torch.load(path, weights_only=False) for path in sorted(newest(shared).rglob("*.pt"))]
    progress = Progress(10, 10, theirs[0]["lr_scheduler"]["num_steps"])
    for number, layout in enumerate((Layout(2), Layout(2, 2), Layout(1, 4), Layout(4, 2, 2))):
        folder, layout = tmp_path / f"classic{number}", dataclasses.replace(layout, padded=PADDED)
        args = vars(theirs[0]["args"]) | vars_of(ours.config, layout)
        write_classic(folder, ours.config, weights, layout, args, moments, progress)
        if layout.pipeline == 1:
            for path, expected in zip(sorted(folder.rglob("*.pt")), theirs, strict=True):
                mine = torch.load(path, weights_only=False)
                for part in ("model", "optimizer"):
                    ours_there, theirs_there = dict(leaves(mine[part])), dict(leaves(expected[part]))
                    assert list(ours_there) == list(theirs_there)
                    assert all(torch.equal(ours_there[place], values) for place, values in theirs_there.items())
        asked = ["--from", "megatron", "--to", "native", "--load", str(folder), "--save", str(tmp_path / str(number))]
        assert convert_checkpoint.main([*asked, *told, "--check"]) == 0
        found = from_native(tmp_path / str(number))
        assert found.tensors.keys() == whole.keys()
        assert all(found.tensors[name].read().equal(tensor) for name, tensor in whole.items())
        assert read_state(tmp_path / str(number)) == read_state(tmp_path / "ours")


def newest(shared: Path) -> Path:
    return shared / "data" / "megatron_2_5" / "gpt_tp2_ckpt" / "iter_0000010"


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors by their place in a tree, and lists of numbers as tensors, which are those of parameters."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, list) and all(isinstance(number, int) for number in value):
        yield place, torch.tensor(value)
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{place}/{name}")


def words_printed(capsys: pytest.CaptureFixture[str], shared: Path) -> list[str]:
    """The flags that the converter has printed, with the data where it is."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    words = [word for line in lines for word in shlex.split(line)]
    words[words.index("--data-path") + 1] = str(shared / "data" / "megatron_2_5" / "tr_text_document")
    return words


def run_recording(rank: int, world_size: int, words: list[str]) -> tuple[Outcome, dict[str, Tensor]]:
    """A run, and of its last stage every micro-batch of its evaluations: tokens, labels and losses, [micro, b, s]."""
    seen: dict[str, list[Tensor]] = {"tokens": [], "labels": [], "losses": []}

    def recording(stage: Chunk, batch: Batch) -> tuple[Tensor, Tensor] | Tensor:
        output = stage(batch["tokens"], batch.get("position_ids"), batch["labels"], hidden=batch.get("hidden"))
        if not stage.last:
            return output
        if not torch.is_grad_enabled():
            for name, values in (("tokens", batch["tokens"]), ("labels", batch["labels"]), ("losses", output)):
                seen[name].append(values.clone())
        return output.sum(), torch.tensor(output.numel())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_gpt, "forward_step", recording)
        outcome = run_pretrain(rank, world_size, words)
    return outcome, {name: torch.stack(values) for name, values in seen.items() if values}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_the_rest_of_the_training(
    ranks: Ranks, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tensor: int, pipeline: int
) -> None:
    """From iteration 5 with the flags that are printed: losses, gradient norms, validation, losses of tokens."""
    converted(shared, tmp_path / "ours", "--ckpt-step", "5", "--vocab-size", str(REAL), "--keep-padding")
    words = words_printed(capsys, shared)
    words += ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)]
    words += ["--distributed-backend", "gloo", "--log-interval", "1", "--eval-at-start"]
    both = ranks(tensor * pipeline, run_recording, [*words, "--data-cache-path", str(tmp_path / "cache")])
    outcome, seen = reporting([outcome for outcome, _ in both]), both[-1][1]
    curve = json.loads((shared / "data/megatron_2_5/gpt_tp2_curve.json").read_text(encoding="utf-8"))
    rest = curve["train"][5:]
    assert_close(outcome.series("loss"), [step["lm_loss"] for step in rest], 1e-5)
    assert_close(outcome.series("grad-norm"), [step["grad_norm"] for step in rest], 1e-3)
    # It prints the learning rate that the next iteration will have.
    assert_close(outcome.series("lr"), [step["learning_rate"] for step in curve["train"][4:9]], 1e-3)
    validation = [*curve["validation"].values(), curve["validation_end"]]
    assert [step["iteration"] for step in outcome.evaluations] == [5, 10, 10]
    assert_close([step["loss"] for step in outcome.evaluations], validation, 1e-6)
    tokens, labels, losses = recorded(shared)
    middle = {name: values[16:32].flatten(0, 1) for name, values in seen.items()}
    assert torch.equal(middle["tokens"], tokens) and torch.equal(middle["labels"], labels)
    assert_close(middle["losses"], losses, 1e-5)
