"""tools/generate_text.py: from a checkpoint saved at one layout, the same text at another; mistakes in a sentence."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.tasks.trained import load_gpt, stored_config
from megatron.training.arguments import parse_composed
from tests.harness.ranks import Ranks
from tests.harness.runs import flags, run_pretrain, write_documents

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "generate_text.py"


def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL), run_name="generate_text")


def written(rank: int, world_size: int, load: str, *words: str) -> str:
    names = tool()
    asked = ["--tensor-model-parallel-size", str(world_size), "--load", load, "--distributed-backend", "gloo", *words]
    return names["write_text"](parse_composed(names["Request"], asked, world_size=world_size))


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    data_path = write_documents(folder / "documents")
    words = flags(data_path, tensor_model_parallel_size=2, train_iters=30, lr=1e-2, save=folder / "saved")
    ranks(2, run_pretrain, words)
    return str(folder / "saved")


@pytest.mark.parametrize("words", [("--temperature", "0"), ("--temperature", "0.7", "--top-k", "5")])
def test_text_is_the_same_at_every_layout(ranks: Ranks, checkpoints: str, words: tuple[str, ...]) -> None:
    asked = ["--prompt", "1 2 3", "--out-seq-length", "20", *words]
    texts = {t: ranks(t, written, checkpoints, *asked) for t in (1, 2, 4)}
    assert texts[1][0].startswith("1 2 3")
    assert len(texts[1][0]) > len("1 2 3")
    assert {text for found in texts.values() for text in found} == {texts[1][0]}


@pytest.mark.parametrize("untied", [False, True])
def test_text_of_a_checkpoint_of_a_pipeline(ranks: Ranks, tmp_path: Path, untied: bool) -> None:
    """Of two stages on each of two ranks, which another run on one rank would have trained alike."""
    chosen = {"num_layers": 4, "train_iters": 4, "lr": 1e-2, "eval_iters": 0, "params_dtype": "float64"}
    words = flags(
        write_documents(tmp_path / "documents"), **chosen, untie_embeddings_and_output_weights=True if untied else None
    )
    stages = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    ranks(2, run_pretrain, [*words, *stages, "--save", str(tmp_path / "split")])
    ranks(1, run_pretrain, [*words, "--save", str(tmp_path / "whole")])
    asked = ["--prompt", "1 2 3", "--out-seq-length", "8", "--temperature", "0"]
    texts = {text for name in ("split", "whole") for text in ranks(1, written, str(tmp_path / name), *asked)}
    assert len(texts) == 1


def loaded_dtype(rank: int, world_size: int, load: str, dtype: torch.dtype | None) -> torch.dtype:
    mpu.initialize_model_parallel(world_size)
    stored = stored_config(load)
    model = load_gpt(load, stored, 100, torch.device("cpu"), dtype)
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
    return model.embedding.word_embeddings.weight.dtype


@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_text_of_a_checkpoint_of_sixteen_bits(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """Sharded when it was saved; read in float32 unless asked otherwise."""
    data_path = write_documents(tmp_path / "documents")
    small = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 8,
        "train_iters": 4,
        "lr": 1e-2,
        "eval_iters": 0,
    }
    words = [
        precision,
        "--initial-loss-scale",
        "1024",
        "--use-distributed-optimizer",
        "--save",
        str(tmp_path / "saved"),
    ]
    ranks(2, run_pretrain, [*flags(data_path, **small), *words])
    asked = ["--prompt", "1 2 3", "--out-seq-length", "8", "--temperature", "0"]
    texts = {text for t in (1, 2) for text in ranks(t, written, str(tmp_path / "saved"), *asked)}
    assert len(texts) == 1
    assert ranks(1, loaded_dtype, str(tmp_path / "saved"), None) == [torch.float32]
    assert ranks(1, loaded_dtype, str(tmp_path / "saved"), torch.bfloat16) == [torch.bfloat16]


def test_mistakes_are_told(checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool()["main"]
    for words, sentence in (
        (["--load", str(tmp_path), "--prompt", "1"], "there is no checkpoint"),
        (["--load", checkpoints, "--prompt", ""], "--prompt: it is empty"),
        (["--load", checkpoints, "--prompt", "1", "--top-k", "-1"], "--top-k -1"),
        (
            ["--load", checkpoints, "--prompt", "1", "--tensor-model-parallel-size", "2"],
            "must equal the number of ranks",
        ),
        (["--prompt", "1"], "--load is not given"),
        (["--load", checkpoints, "--prompt", "1", "--sequence-parallel"], "--sequence-parallel: it is for training"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*words, "--distributed-backend", "gloo"])
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err
