"""Classic checkpoints at any layout and of any version become ours, bit for bit; what does not fit is refused."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import read_state
from megatron.checkpointing.convert import Transfer, from_native, native, native_logits
from megatron.checkpointing.convert.deferred import Deferred
from megatron.model import GPTModel, TransformerConfig
from megatron.mpu import parameter_shardings
from tests.harness.classic_files import Layout, Progress, write_classic
from tests.harness.closeness import assert_close
from tests.harness.serial_gpt import random_weights, serial_logits
from tools import convert_checkpoint

VOCAB = 101
CONFIG = TransformerConfig(4, 16, 4, 16, attention_dropout=0.0, hidden_dropout=0.0, activation="gelu_erf")
_POST = "apply_residual_connection_post_layernorm"
ARGS = {"bias_gelu_fusion": False, "openai_gelu": False, "consumed_train_samples": 28, "global_batch_size": 4}


def random(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shardings = parameter_shardings(GPTModel(CONFIG, VOCAB, device="meta"))
    return random_weights({name: sharding.global_shape for name, sharding in shardings.items()}, seed, dtype)


def convert(source: Path, target: Path, *words: str) -> int:
    asked = ["--from", "megatron", "--to", "native", "--load", str(source), "--save", str(target)]
    return convert_checkpoint.main([*asked, *([] if "--vocab-size" in words else ["--vocab-size", str(VOCAB)]), *words])


LAYOUTS = [
    Layout(),
    Layout(tensor=4, version=2.0),
    Layout(tensor=2, version=1.0, padded=256),
    Layout(tensor=2, version=0, old=True),
    Layout(pipeline=4),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, pipeline=2, virtual=2),
]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, torch.float32) for layout in LAYOUTS]
    + [(LAYOUTS[0], torch.float16), (Layout(2, 2, apex=True), torch.float16), (LAYOUTS[6], torch.bfloat16)],
    ids=str,
)
def test_every_layout_and_version(tmp_path: Path, layout: Layout, dtype: torch.dtype) -> None:
    masters, moments = random(1), {"exp_avg": random(2), "exp_avg_sq": random(3)}
    weights = {name: value.to(dtype) for name, value in masters.items()}
    moments |= {} if dtype == torch.float32 else {"master_weight": masters}
    write_classic(
        tmp_path / "theirs",
        CONFIG,
        weights,
        layout,
        ARGS | {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16},
        moments,
    )
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--check") == 0
    found = from_native(tmp_path / "ours")
    expected = weights | {f"optimizer.{kind}.{n}": v for kind, values in moments.items() for n, v in values.items()}
    assert found.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name].read(), value), name
    assert found.config == CONFIG
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    wide = {name: value.float() for name, value in weights.items()}
    assert_close(native_logits(tmp_path / "ours", tokens), serial_logits(CONFIG, wide, tokens), 1e-5)


def test_progress_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = {"exp_avg": random(2, torch.float32), "exp_avg_sq": random(3), "master_weight": random(1)}
    weights = {name: value.half() for name, value in moments["master_weight"].items()}
    args = ARGS | {"fp16": True, "lr": 0.1, "seq_length": 16, "seed": 5, "data_path": ["a"], "bias_gelu_fusion": True}
    write_classic(tmp_path / "theirs", CONFIG, weights, Layout(), args, moments, Progress(steps=6))
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    state = read_state(tmp_path / "ours")
    assert state["run"] == {
        "iteration": 7,
        "consumed_samples": 28,
        "scheduled_samples": 24,
        "skipped_iterations": 1,
    }
    scaler = {"scale": 1024.0, "clean_steps": 5, "patience": 1}
    assert state["optimizer"] == {"step_count": 6, "skipped_in_a_row": 0, "loss_scaler": scaler}
    said = capsys.readouterr().out
    for words in ("--fp16", "--seed 5", "--lr 0.1", "--data-path a", "--seq-length 16"):
        assert words in said
    assert "--activation" not in said and "gelu_tanh" not in said  # the default
    assert state["config"]["model"]["activation"] == "gelu_tanh"


def test_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, args = random(1), ARGS | {"accumulate_allreduce_grads_in_fp32": False}
    write_classic(tmp_path / "theirs", CONFIG, weights, Layout(), args, {"exp_avg": random(2), "exp_avg_sq": random(3)})
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--no-load-optim", "--dtype", "bfloat16", "--check") == 0
    assert "--bf16" in (said := capsys.readouterr().out) and "--finetune" in said
    assert "--no-accumulate" not in said  # with --bf16 it would be refused
    found = from_native(tmp_path / "ours").tensors
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].read(), weights[name].bfloat16()) for name in weights)
    assert convert(tmp_path / "theirs", tmp_path / "other", "--dtype", "bfloat16") == 2
    assert "--no-load-optim" in capsys.readouterr().err
    # A folder of Hugging Face's has no optimizer, whose number format could stand in the way.
    assert convert(tmp_path / "theirs", tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--check") == 0
    assert "the optimizer's state is left out" in capsys.readouterr().out


def test_weights_of_several_number_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where norms alone are in float32."""
    weights = {name: value if "layernorm" in name else value.half() for name, value in random(1).items()}
    write_classic(tmp_path / "theirs", CONFIG, weights, Layout(2, 2), ARGS)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "torch.float16, torch.float32: --dtype with --no-load-optim makes one" in capsys.readouterr().err
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--dtype", "float32", "--no-load-optim", "--check") == 0
    found = from_native(tmp_path / "ours").tensors
    assert all(found[name].read().equal(value.float()) for name, value in weights.items())


def test_flags_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written."""
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS | {"num_attention_heads": 4})
    (tmp_path / "file").touch()
    for save, words, sentence in (
        ("ours", ["--num-attention-heads", "2"], "--num-attention-heads 2: the checkpoint .* says 4"),
        (
            "ours",
            ["--vocab-size", "1000"],
            "rows, but the vocabulary has 1000 tokens, by --vocab-size or the tokenizer",
        ),
        ("file", [], "--save .*/file: it cannot be written, for .*/file is no folder"),
    ):
        assert convert(tmp_path / "theirs", tmp_path / save, *words) == 2
        assert re.search(sentence, capsys.readouterr().err), sentence
    assert not (tmp_path / "ours").exists()


def test_a_full_disk_is_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    monkeypatch.setattr(native, "write_pieces", full)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    words = f"error: --save {tmp_path / 'ours'}: it could not be written: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == words
    assert list((tmp_path / "ours").glob("*iter*")) == []


def spoiling(patch: pytest.MonkeyPatch, wrong: str) -> None:
    """Let the converter write the tensor `wrong` with its rows moved by one, as a mistake in their order would.

    Where they are all the same they are one more.
    """
    to_native = convert_checkpoint.to_native

    def spoiled(transfer: Transfer, *where: Any) -> Path:
        right = transfer.tensors[wrong].read()
        tensor = right + 1 if right.roll(1, 0).equal(right) else right.roll(1, 0)
        tensors = {**transfer.tensors, wrong: Deferred(tensor.dtype, tuple(tensor.shape), lambda: tensor)}
        return to_native(dataclasses.replace(transfer, tensors=tensors), *where)

    patch.setattr(convert_checkpoint, "to_native", spoiled)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_finds_any_weight_that_is_wrong(tmp_path: Path, dtype: str) -> None:
    write_classic(tmp_path / "theirs", CONFIG, (weights := random(1)), Layout(), ARGS)
    for wrong in (name for name in weights if "layers" not in name or "layers.2." in name):
        with pytest.MonkeyPatch.context() as patch:
            spoiling(patch, wrong)
            assert convert(tmp_path / "theirs", tmp_path / wrong, "--dtype", dtype, "--check") == 2, wrong


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = torch.load(path, weights_only=False)
    change(record)
    torch.save(record, path)


def words_of(record: dict[str, Any]) -> dict[str, Any]:
    return record["model"]["language_model"]["embedding"]["word_embeddings"]


def drop_layer(record: dict[str, Any], begin: str) -> None:
    encoder = record["model"]["language_model"]["encoder"]
    for name in [name for name in encoder if name.startswith(begin)]:
        del encoder[name]


EVERY = ["00_000", "01_000", "00_001", "01_001"]
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a tensor more": (lambda r: r["model"].update(pooler={"weight": torch.ones(2)}), "no place in the model: pooler"),
    "a tensor less": (
        lambda r: r["model"]["language_model"]["encoder"].pop("layers.1.mlp.dense_4h_to_h.bias"),
        "not among those of another tensor rank: encoder.layers.1.mlp.dense_4h_to_h.bias",
    ),
    "another shape": (lambda r: words_of(r).update(weight=torch.ones(128, 16)), "does not fit together"),
    "another iteration": (lambda r: r.update(iteration=8), "not of one iteration"),
    "a state more": (lambda r: r["optimizer"]["state"][0].update(max=torch.ones(2)), "not understood: max"),
    "a state of another shape": (lambda r: r["optimizer"]["state"][3].update(exp_avg=torch.ones(2)), "shapes"),
    "another version": (lambda r: r.update(checkpoint_version=4.0), "version"),
    "other ranks": (lambda r: setattr(r["args"], "tensor_model_parallel_size", 4), "there are files of 2 ranks"),
    "a last layer less": (
        lambda r: drop_layer(r, "layers.1."),
        "there are 3 layers, and it was saved with num_layers 4",
    ),
    "layers of other names": (
        lambda r: r["model"]["language_model"].update(decoder=r["model"]["language_model"].pop("encoder")),
        "has no layer of a classic transformer, such as encoder.layers.0",
    ),
    "a state without groups": (lambda r: r.update(optimizer={"state": {}}), "param_groups is"),
    "a state that is a number": (lambda r: r["optimizer"]["state"][3].update(exp_avg=1), "where a tensor is expected"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    moments = {"exp_avg": random(2), "exp_avg_sq": random(3)} if "state" in what else None
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(2, 2), ARGS, moments)
    change, words = CHANGES[what]
    # Flags are read from the first rank's file, and a layer is missing on all tensor ranks.
    places = {"other ranks": ["00_000"], "a last layer less": ["00_000", "01_000"], "layers of other names": EVERY}
    for place in places.get(what, ["01_000"]):
        edited(tmp_path / f"theirs/iter_0000007/mp_rank_{place}/model_optim_rng.pt", change)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert str(tmp_path / "theirs") in complaint
    assert not (tmp_path / "ours").exists()


def test_copies_of_the_embedding_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(1, 2), ARGS)
    path = tmp_path / "theirs/iter_0000007/mp_rank_00_001/model_optim_rng.pt"
    edited(path, lambda r: r["model"]["word_embeddings_for_head"]["weight"].add_(1))
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    complaint = capsys.readouterr().err
    assert "iter_0000007: embedding.word_embeddings.weight: the first and the last pipeline stage do not" in complaint
    assert not (tmp_path / "ours").exists()


TRACKERS: dict[bytes, str] = {
    b"": "must hold the number",
    b"\xff\xfe7": "must hold the number",
    "\u0667".encode(): "must hold the number",
    b"-7": "must hold the number",
    b"7" * 5000: "it has 5000 bytes, and at most 100 are read",
}


@pytest.mark.parametrize("content", TRACKERS)
def test_trackers_that_name_no_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    tracker = tmp_path / "theirs" / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(content)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"error: {tracker}: ") and TRACKERS[content] in complaint
    tracker.unlink()
    os.mkfifo(tracker)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert str(tracker) in capsys.readouterr().err
    tracker.unlink()
    tracker.write_bytes(b" 7\r\n")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0


def test_two_folders_of_one_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs have saved the same iteration, with and without a pipeline."""
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    folder = tmp_path / "theirs/iter_0000007"
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_00_000")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "iter_0000007: mp_rank_00 and mp_rank_00_000 are both of tensor rank 0" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(2, 2), ARGS)
    asked = ["--from", "megatron", "--to", "native", "--load", str(tmp_path / "theirs"), "--save", str(tmp_path / "o")]
    assert convert_checkpoint.main(asked) == 2
    assert "padded to 128" in capsys.readouterr().err
    path = tmp_path / "theirs/iter_0000007/mp_rank_01_001/model_optim_rng.pt"
    content = path.read_bytes()
    for cut in (content[:-1], content[: len(content) // 2], b"PK\3\4" + content[4:-300], b""):
        path.write_bytes(cut)
        assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
        assert "mp_rank_01_001" in capsys.readouterr().err
    path.unlink()
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "mp_rank_01_001" in capsys.readouterr().err
    path.parent.rmdir()
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "tensor rank 1, pipeline rank 1 is missing" in capsys.readouterr().err


def test_the_released_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of float16 alone, of the first version and by its names, in a folder that has no number."""
    weights = random(1, torch.float16)
    old = {"fp16": True, "batch_size": 8, "warmup": 0.01, "DDP_impl": "torch", "checkpoint_num_layers": 1}
    source = tmp_path / "theirs"
    write_classic(source, CONFIG, weights, Layout(version=0, old=True), old)
    (source / "iter_0000007").rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    assert convert(source, tmp_path / "ours", "--activation", "gelu_erf", "--check") == 0
    said = capsys.readouterr().out
    assert "--fp16" in said and "--finetune" in said and "and to go on" not in said
    found = from_native(tmp_path / "ours")
    assert found.config == CONFIG and found.optimizer is None
    assert found.tensors.keys() == weights.keys()
    assert all(found.tensors[name].read().equal(value) for name, value in weights.items())


def test_the_optimizer_of_the_first_versions(tmp_path: Path) -> None:
    """Its parts have other names there, and its loss scale is an object of the program."""
    masters, moments = random(1), {"exp_avg": random(2), "exp_avg_sq": random(3)}
    weights = {name: value.half() for name, value in masters.items()}
    layout = Layout(tensor=2, version=0, old=True, apex=True)
    write_classic(tmp_path / "theirs", CONFIG, weights, layout, ARGS, {**moments, "master_weight": masters})

    def renamed(record: dict[str, Any]) -> None:
        saved = record["optimizer"]
        old = {"optimizer_state_dict": saved["optimizer"], "fp32_from_fp16": saved["fp32_from_fp16_params"]}
        record["optimizer"] = {"loss_scaler": Layout(), "dynamic_loss_scale": True, "overflow": False, **old}
        record["lr_scheduler"] = {"start_lr": 0.1, "num_iters": 7, "warmup_iter": 2.0}

    for path in (tmp_path / "theirs").rglob("*.pt"):
        edited(path, renamed)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    found = from_native(tmp_path / "ours").tensors
    for kind, values in {**moments, "master_weight": masters}.items():
        assert all(found[f"optimizer.{kind}.{name}"].read().equal(value) for name, value in values.items())
    state = read_state(tmp_path / "ours")
    assert state["optimizer"] == {"step_count": 7, "skipped_in_a_row": 0, "loss_scaler": {}}
    assert state["run"]["scheduled_samples"] == 28


def test_the_residual_of_the_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its logits are compared by `--check` with those of another computation; a GPT-2 elsewhere is no such model."""
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(2, 2), ARGS | {_POST: True})
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--check") == 0
    assert f"--{_POST.replace('_', '-')}" in capsys.readouterr().out
    assert from_native(tmp_path / "ours").config == dataclasses.replace(CONFIG, **{_POST: True})
    asked = ["--from", "native", "--to", "hf", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "there")]
    assert convert_checkpoint.main(asked) == 2
    assert f"--{_POST.replace('_', '-')}" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_formats_are_named_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_checkpoint.main(["--from", "mega", "--load", "a", "--save", "b"]) == 2
    assert capsys.readouterr().err.strip() == "error: --to is not given, and there is no default for it"
    assert convert_checkpoint.main(["--from", "mega", "--to", "onnx", "--load", "a", "--save", "b"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --from mega: accepted are hf, megatron, native",
        "error: --to onnx: accepted are native, hf",
    ]


def test_a_flipped_byte_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    path = tmp_path / "theirs/iter_0000007/mp_rank_00/model_optim_rng.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "does not match its checksum" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_its_gelu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(version=0, old=True), {})
    assert convert(tmp_path / "theirs", tmp_path / "one") == 0
    assert "does not say which GELU" in capsys.readouterr().out
    assert from_native(tmp_path / "one").config == dataclasses.replace(CONFIG, activation="gelu_tanh")
    assert convert(tmp_path / "theirs", tmp_path / "two", "--activation", "gelu_erf") == 0
    assert from_native(tmp_path / "two").config == CONFIG
