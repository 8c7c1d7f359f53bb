"""tools/generate_text.py: from a checkpoint saved at one layout, the same text at another; mistakes in a sentence."""

import runpy
from pathlib import Path
from typing import Any

import pytest

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
    ):
        with pytest.raises(SystemExit) as caught:
            main([*words, "--distributed-backend", "gloo"])
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err
