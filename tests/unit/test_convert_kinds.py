"""Classic checkpoints and configs in which something is of the wrong kind: one sentence each, which names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.base.complaints import ConfigError
from megatron.tasks.hugging_face import open_folder
from megatron.training.failure import print_problems
from tests.harness.classic_files import Layout, write_classic
from tests.unit.test_convert_classic import ARGS, CONFIG, convert, edited, random
from tools import convert_checkpoint


def state_of(record: dict[str, Any]) -> dict[Any, Any]:
    return record["optimizer"]["state"]


def flag(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: setattr(record["args"], name, value)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "flags": (lambda r: r.update(args={"num_layers": 2}), "args is 'dict'"),
    "flags of another class": (lambda r: r.update(args=Path("x")), "args is"),
    "iteration": (lambda r: r.update(iteration="7"), "iteration is '7'"),
    "huge iteration": (lambda r: r.update(iteration=2**80), "iteration is"),
    "version": (lambda r: r.update(checkpoint_version=float("inf")), "checkpoint_version is inf"),
    "model": (lambda r: r.update(model=[torch.ones(2)]), "model is a list"),
    "model that is a tensor": (lambda r: r.update(model=torch.ones(2)), "model is a FileTensor"),
    "part of the model": (lambda r: r["model"].update(language_model=3), "language_model. is a int"),
    "name": (lambda r: r["model"].update({3: torch.ones(2)}), "model has a int as a name"),
    "name with a line": (lambda r: r["model"].update({"a\nb": torch.ones(2)}), "is no name of a tensor"),
    "same name": (lambda r: r["model"].update({"language_model.a": torch.ones(2), "a": torch.ones(2)}), "two tensors"),
    "escape in a name": (lambda r: r["model"].update({"\x1b[2Ja\n": 3}), "'\\x1b[2Ja\\n.' is a int"),
    "long name": (lambda r: r["model"].update({"a" * 10**6: torch.ones(2)}), "is no name of a tensor"),
    "dimensions": (lambda r: r["model"].update(a=torch.ones(1, 2, 3)), "must be a vector or a matrix"),
    "number for a tensor": (lambda r: r["model"].update(a=torch.tensor(1.0)), "must be a vector or a matrix"),
    "heads": (flag("num_attention_heads", "4"), "num_attention_heads is '4'"),
    "epsilon": (flag("layernorm_epsilon", [1]), "layernorm_epsilon is"),
    "ramp": (flag("rampup_batch_size", ["4", [1], "9"]), "rampup_batch_size has [1]"),
    "ramp without end": (flag("rampup_batch_size", [float("nan")]), "rampup_batch_size has nan"),
    "a flag that no model has": (flag("layernorm_epsilon", -1), "--layernorm-epsilon -1: it must be at least 0"),
    "samples": (flag("consumed_train_samples", 1.5), "consumed_train_samples is 1.5"),
    "steps of the schedule": (lambda r: r.update(lr_scheduler={"num_steps": "x"}), "num_steps is 'x'"),
    "optimizer": (lambda r: r.update(optimizer=[1]), "it is 'list'"),
    "groups": (lambda r: r["optimizer"].update(param_groups={}), "param_groups is 'dict'"),
    "no groups": (lambda r: r["optimizer"].pop("param_groups"), "param_groups is 'NoneType'"),
    "numbers": (lambda r: r["optimizer"]["param_groups"][0].update(params=["a"]), "params is 'str'"),
    "state": (lambda r: state_of(r).update({0: [1]}), "state of 0 is 'list'"),
    "moment": (lambda r: state_of(r)[0].update(exp_avg=3), "is 'int' where a tensor"),
    "kind of state": (lambda r: state_of(r)[0].update({"a\nb": torch.ones(2)}), "not understood: 'a\\nb'"),
    "step": (lambda r: state_of(r)[0].update(step=torch.ones(2)), "must be one number"),
    "infinite step": (lambda r: state_of(r)[0].update(step=torch.tensor(float("inf"))), "there is inf"),
    "scale": (lambda r: r["optimizer"].update(grad_scaler={"scale": torch.ones(2)}), "must be one number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_kinds_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    change, words = WRONG[what]
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS, {"exp_avg": random(2)})
    edited(tmp_path / "theirs/iter_0000007/mp_rank_00/model_optim_rng.pt", change)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    complaint = capsys.readouterr().err
    assert words in complaint and str(tmp_path / "theirs") in complaint
    assert len(complaint.strip().splitlines()) == 1 and len(complaint) < 500 and complaint.strip().isprintable()


def test_no_control_character_of_a_file_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_problems(ValueError("a\x1b[2J\ud800\nb ä"))
    assert capsys.readouterr().err == "error: a\\x1b[2J\\ud800\nb ä\n"


def test_a_folder_of_a_rank_far_away_is_no_long_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    (tmp_path / f"theirs/iter_0000007/mp_rank_{10**12}").mkdir()
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert "the folder of tensor rank 1, pipeline rank 0 is missing" in capsys.readouterr().err


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4}
CONFIGS: dict[str, tuple[Any, str]] = {
    "layers": ({**GPT2, "n_layer": 10**9}, "num_layers 1000000000 is more"),
    "many layers": ({**GPT2, "n_layer": 10**6}, "num_layers 1000000 is more than there are tensors"),
    "width": ({**GPT2, "n_embd": 2**40}, "hidden_size 1099511627776 is more"),
    "text": ({**GPT2, "n_head": "2"}, "num_attention_heads is '2'"),
    "nothing": ({**GPT2, "n_head": None}, "num_attention_heads is None"),
    "activation": ({**GPT2, "activation_function": ["gelu"]}, "activation_function ['gelu']"),
    "type": ({**GPT2, "model_type": {"a": 1}}, "model_type {'a': 1}"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configs_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    config, words = CONFIGS[what]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"wte.weight": torch.ones(9, 8)}, tmp_path / "pytorch_model.bin")
    asked = ["--from", "hf", "--to", "native", "--load", str(tmp_path), "--save", str(tmp_path / "ours")]
    assert convert_checkpoint.main(asked) == 2
    complaint = capsys.readouterr().err
    assert words in complaint and "config.json" in complaint and len(complaint.strip().splitlines()) == 1


def test_sentences_about_a_folder_of_hugging_face_name_it(tmp_path: Path) -> None:
    """Where it is taken as it stands: a matrix of another shape, and sizes that no model has, all told at once."""
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {
        "shape": (GPT2, ["embedding.word_embeddings.weight is [9, 4] and must be [9, 8]"]),
        "sizes": ({**GPT2, "n_head": 3, "layer_norm_epsilon": -1}, ["--num-attention-heads 3", "--layernorm-epsilon"]),
    }
    stems = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    sizes: dict[str, tuple[int, ...]] = {
        "attn.c_attn": (8, 24),
        "attn.c_proj": (8, 8),
        "mlp.c_fc": (8, 32),
        "mlp.c_proj": (32, 8),
    }
    weights = {"wte.weight": torch.ones(9, 4), "wpe.weight": torch.ones(4, 8)}
    weights |= {f"h.0.{stem}.weight": torch.ones(sizes.get(stem, (8,))) for stem in stems}
    weights |= {f"h.0.{stem}.bias": torch.ones(sizes.get(stem, (8,))[-1]) for stem in stems}
    weights |= {"ln_f.weight": torch.ones(8), "ln_f.bias": torch.ones(8)}
    for name, (config, words) in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        torch.save(weights, tmp_path / name / "pytorch_model.bin")
        with pytest.raises(ConfigError) as caught:
            open_folder(tmp_path / name)
        assert all(problem.startswith(f"{tmp_path / name}") for problem in caught.value.problems[:1])
        assert all(word in str(caught.value) for word in words)
