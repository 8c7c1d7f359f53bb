"""A random GPT-2 of Hugging Face's to ours, at several layouts, and back: the same bits, and its library's logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.base.stages import StagePart
from megatron.checkpointing import load_checkpoint, read_state, save_checkpoint
from megatron.model import GPTModel, TransformerConfig, gather_logits
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tools import convert_checkpoint

VOCAB, LENGTH = 97, 24


def config(activation: str = "gelu_tanh") -> TransformerConfig:
    return TransformerConfig(
        4, 48, 4, 32, activation=activation, attention_dropout=0.0, hidden_dropout=0.0, layernorm_epsilon=1e-4
    )


def ids() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def convert(source: str, target: str, load: Path, save: Path, *words: str) -> None:
    asked = ["--from", source, "--to", target, "--load", str(load), "--save", str(save), *words]
    assert convert_checkpoint.main(asked) == 0


def loaded(directory: Path, rank: int, world_size: int, stages: list[StagePart] | None) -> GPTModel:
    """This rank's part of the model of a checkpoint, by the config that is stored there."""
    stored = TransformerConfig(**read_state(directory)["config"]["model"])
    model = GPTModel(stored, VOCAB, stages=stages)
    load_checkpoint(directory, _placed(model), rank=rank, layout={}, world_size=world_size)
    return model.eval()


def _placed(model: GPTModel) -> dict[str, Any]:
    shardings = mpu.parameter_shardings(model)
    return {name: (parameter.detach(), shardings[name]) for name, parameter in model.named_parameters()}


def logits_at(rank: int, size: int, directory: Path) -> Any:
    mpu.initialize_model_parallel(size)
    with torch.no_grad():
        return gather_logits(loaded(directory, rank, size, None)(ids()), VOCAB).numpy()


def saved_anew(rank: int, size: int, source: Path, target: Path) -> None:
    """Load at 2 tensor ranks and 2 stages, and save from there."""
    mpu.initialize_model_parallel(2, 2)
    first = mpu.get_pipeline_model_parallel_rank() == 0
    part = StagePart(range(0, 1) if first else range(1, 4), first, not first)
    model = loaded(source, rank, size, [part])
    copies = model.duplicate_parameters()
    written = {name: held for name, held in _placed(model).items() if name not in copies}
    assert first or len(copies) == 1
    save_checkpoint(target, 3, written, read_state(source), {}, rank=rank, world_size=size, layout={"tensor": 2})


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
def test_there_and_back(ranks: Ranks, tmp_path: Path, activation: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    from tests.harness.hf_gpt2 import random_gpt2  # here, so that the ranks do not load transformers

    theirs = random_gpt2(config(activation), VOCAB, seed=3).eval()
    theirs.save_pretrained(tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "ours", "--check")
    said = capsys.readouterr().out
    assert "4 x transformer.h.*.attn.c_attn.weight" in said
    assert f"--vocab-size {VOCAB}" in said and "--layernorm-epsilon 0.0001" in said and "--finetune" in said
    with torch.no_grad():
        logits = theirs(ids()).logits
    for size in (1, 2):
        for found in ranks(size, logits_at, tmp_path / "ours"):
            assert_close(found, logits, 1e-5)
    ranks(4, saved_anew, tmp_path / "ours", tmp_path / "split")
    convert("native", "hf", tmp_path / "split", tmp_path / "back", "--check")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with torch.no_grad():
        assert_close(again(ids()).logits, logits, 1e-5)
    kept = {
        name for name in vars(theirs.config) if name.startswith(("n_", "attn_", "resid_", "embd_", "layer_", "act"))
    }
    assert len(kept) >= 10
    changed = {name for name in kept if getattr(again.config, name) != getattr(theirs.config, name)}
    assert changed == {"n_inner"}  # not said where it is the usual one


@pytest.mark.parametrize("form", ["bare names and masks", "pickled", "sharded", "untied", "float16"])
def test_other_forms_of_the_folder(tmp_path: Path, form: str) -> None:
    from transformers import AutoModelForCausalLM

    from tests.harness.hf_gpt2 import random_gpt2

    theirs = random_gpt2(config(), VOCAB, seed=4)
    if form == "untied":
        theirs.config.tie_word_embeddings = False
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 48))
    if form == "float16":
        theirs = theirs.half()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB" if form == "sharded" else "1GB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (form == "sharded")
    if form in ("bare names and masks", "pickled"):
        _rewrite(tmp_path / "hf", theirs.state_dict(), pickled=form == "pickled")
    convert("hf", "native", tmp_path / "hf", tmp_path / "ours", "--check")
    convert("native", "hf", tmp_path / "ours", tmp_path / "back")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    for name, value in theirs.state_dict().items():
        assert again.state_dict()[name].dtype == value.dtype
        assert torch.equal(again.state_dict()[name], value), name


def _rewrite(folder: Path, weights: dict[str, Tensor], pickled: bool) -> None:
    """As the first GPT-2 was published: names without the model's own prefix, and the causal masks among them."""
    from safetensors.torch import save_file

    bare = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(4)}
    (folder / "model.safetensors").unlink()
    if pickled:
        torch.save(bare, folder / "pytorch_model.bin")
    else:
        save_file(bare, folder / "model.safetensors")


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.harness.hf_gpt2 import random_gpt2

    letters = [chr(i) for i in range(33, 127)] + [chr(i) for i in range(161, 173)] + [chr(i) for i in range(174, 324)]
    vocabulary = {token: i for i, token in enumerate([*letters, "he", "ll", "<|endoftext|>"])}
    random_gpt2(config(), len(vocabulary), seed=5).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    convert("hf", "native", tmp_path / "hf", tmp_path / "ours")
    stored = read_state(tmp_path / "ours")["config"]["tokenizer"]
    assert stored["tokenizer_type"] == "GPT2BPETokenizer"
    assert Path(stored["vocab_file"]).parent == tmp_path / "ours" / "tokenizer"
    convert("native", "hf", tmp_path / "ours", tmp_path / "back")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("hello<|endoftext|>")["input_ids"] == [vocabulary[t] for t in ("he", "ll", "o", "<|endoftext|>")]
    saved = json.loads((tmp_path / "back" / "config.json").read_text())
    assert saved["eos_token_id"] == vocabulary["<|endoftext|>"]
    assert saved["vocab_size"] == len(vocabulary)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"n_layer": 3}, "no place in the model: transformer.h.3"),
        ({"n_layer": 5}, "transformer.h.4"),
        ({"n_positions": 16}, "embedding.position_embeddings.weight is [32, 48] and must be [16, 48]"),
        ({"n_head": 5}, "--num-attention-heads 5"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    from tests.harness.hf_gpt2 import random_gpt2

    random_gpt2(config(), VOCAB, seed=6).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    asked = ["--from", "hf", "--to", "native", "--load", str(tmp_path / "hf"), "--save", str(tmp_path / "ours")]
    assert convert_checkpoint.main(asked) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_a_folder_with_a_model_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.harness.hf_gpt2 import random_gpt2

    random_gpt2(config(), VOCAB, seed=6).save_pretrained(tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "ours")
    for target, folder in (("native", "ours"), ("hf", "hf")):
        asked = ["--from", "native", "--to", target, "--load", str(tmp_path / "ours"), "--save", str(tmp_path / folder)]
        assert convert_checkpoint.main(asked) == 2
        assert "already" in capsys.readouterr().err
