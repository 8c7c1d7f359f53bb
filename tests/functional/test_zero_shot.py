"""WikiText-103 and LAMBADA at several layouts: the figures of plain calls of Hugging Face's library; mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.model import GPTModel
from megatron.tasks import main
from megatron.tasks.detokenizing import detokenize
from megatron.tasks.trained import parse_request
from megatron.tasks.zero_shot import ZeroShotRequest, evaluate
from tests.harness.ranks import Ranks
from tests.harness.runs import complaints
from tests.harness.zero_shot import LENGTH, Reference
from tools import convert_checkpoint

TOKENS = 20_000


def evaluated(rank: int, world_size: int, words: list[str]) -> dict[str, float]:
    return evaluate(parse_request(ZeroShotRequest, [*words, "--distributed-backend", "gloo"], prog="main"))


def same_figures(ranks: Ranks, layout: tuple[int, int, int], *words: Any) -> dict[str, float]:
    """The figures, which must be equal on the ranks of (tensor, pipeline, data)."""
    t, p, d = layout
    sizes = ["--tensor-model-parallel-size", str(t), "--pipeline-model-parallel-size", str(p)]
    found: list[dict[str, float]] = ranks(t * p * d, evaluated, [*map(str, words), *sizes])
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero_shot")


@pytest.fixture(scope="module")
def reference(folder: Path, shared: Path) -> Reference:
    return Reference(folder / "hf", shared)


@pytest.fixture(scope="module")
def load(folder: Path, reference: Reference) -> Path:
    """The model's checkpoint."""
    asked = ["--from", "hf", "--to", "native", "--load", str(folder / "hf"), "--save", str(folder / "ours")]
    assert convert_checkpoint.main(asked) == 0
    return folder / "ours"


@pytest.fixture(scope="module")
def text(folder: Path, reference: Reference) -> Path:
    """A beginning of WikiText of about 20,000 tokens, without a line end behind it."""
    path = folder / "wiki.tokens"
    path.write_text(reference.wikitext.read_text(encoding="utf-8")[:46_000].rstrip(), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("stride", "layouts"), [(32, [(1, 1, 1), (2, 1, 1), (1, 2, 1)]), (LENGTH, [(1, 1, 3), (2, 2, 1)])]
)
def test_wikitext_is_what_transformers_says(
    ranks: Ranks, load: Path, text: Path, reference: Reference, stride: int, layouts: list[tuple[int, int, int]]
) -> None:
    raw = text.read_text(encoding="utf-8")
    ids = reference.ids(detokenize(raw))
    assert 0.9 * TOKENS < len(ids) <= TOKENS
    loss, words = reference.text_loss(ids, LENGTH, stride), len(raw.strip().split(" "))
    asked = ["--task", "WIKITEXT103", "--load", load, "--valid-data", text, "--overlapping-eval", stride]
    for layout in layouts:
        found = same_figures(ranks, layout, *asked, "--micro-batch-size", 16)
        assert (found["words"], found["tokens"], found["scored"]) == (words, len(ids), len(ids) - 1)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["word_perplexity"] == pytest.approx(math.exp(loss / words), rel=1e-4)
        assert found["token_perplexity"] == pytest.approx(math.exp(loss / (len(ids) - 1)), rel=1e-4)


@pytest.mark.parametrize("strict", [True, False])
def test_lambada_is_what_transformers_says(ranks: Ranks, load: Path, reference: Reference, strict: bool) -> None:
    """Most passages are longer than the context, and of most words not all subwords come alike."""
    hits = sum(reference.hits(reference.passages, strict=strict))
    loss = sum(reference.guess_loss(text, strict=strict) for text in reference.passages) / 40
    assert 0 < hits < 40
    asked = [
        "--task",
        "LAMBADA",
        "--load",
        load,
        "--valid-data",
        reference.lambada,
        *([] if strict else ["--no-strict-lambada"]),
    ]
    for layout in [(1, 1, 2), (2, 1, 1), (1, 2, 1)]:
        found = same_figures(ranks, layout, *asked, "--micro-batch-size", 3)
        assert found.pop("loss") == pytest.approx(loss, rel=1e-4)
        assert found == {"accuracy": hits / 40, "right": hits, "passages": 40, "left_out": 0}


def test_a_folder_of_hugging_face_is_evaluated_as_it_stands(
    ranks: Ranks, folder: Path, load: Path, reference: Reference
) -> None:
    """Bit for bit as the checkpoint that conversion makes of it."""
    asked = ["--task", "LAMBADA", "--valid-data", reference.lambada, "--micro-batch-size", 8]
    for layout in [(1, 1, 1), (2, 2, 1)]:
        converted, direct = (same_figures(ranks, layout, *asked, "--load", place) for place in (load, folder / "hf"))
        assert direct == converted


def test_a_script_of_megatron_lm_evaluates(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags; a text shorter than one window; logits for the scored tokens alone."""
    (tmp_path / "wiki").write_text(" = A = \n \n The cat , it sat .")
    words = f"""--task WIKITEXT103 --valid-data {tmp_path / "wiki"} --load {load} --tokenizer-type GPT2BPETokenizer
        --vocab-file {load}/tokenizer/vocab.json --merge-file {load}/tokenizer/merges.txt --strict-lambada
        --tensor-model-parallel-size 1 --num-layers 2 --hidden-size 48 --num-attention-heads 4 --batch-size 8
        --checkpoint-activations --seq-length {LENGTH} --max-position-embeddings {LENGTH} --log-interval 1
        --no-load-optim --no-load-rng --distributed-backend gloo""".split()
    main.main(words)
    told = capsys.readouterr().out
    assert "WIKITEXT103: 11 words, " in told and "per word: perplexity " in told and "per token: perplexity" in told
    assert "1 windows of up to 128 tokens, each 32 further" in told and "batch 1 of 1" in told


def test_logits_are_calculated_for_scored_tokens_alone(
    ranks: Ranks, load: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    forward = GPTModel.forward

    def counted(self: GPTModel, *args: Any, **named: Any) -> torch.Tensor:
        result = forward(self, *args, **named)
        counts.append(result.numel())
        return result

    monkeypatch.setattr(GPTModel, "forward", counted)
    asked = ["--task", "WIKITEXT103", "--load", str(load), "--valid-data", str(text), "--distributed-backend", "gloo"]
    found = evaluate(parse_request(ZeroShotRequest, asked, prog="main"))
    assert sum(counts) == found["scored"]


def test_passages_that_cannot_be_scored_are_told(
    load: Path, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["word", reference.passages[0] + " \n ", "", reference.passages[1]]
    path = tmp_path / "lambada.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text}) for text in texts))
    main.main(["--task", "LAMBADA", "--load", str(load), "--valid-data", str(path), "--distributed-backend", "gloo"])
    told = capsys.readouterr().out
    hits = sum(reference.hits(reference.passages[:2], strict=True))
    for line in (1, 5):
        assert f"{path}: line {line}: it is not scored, for it has less than two words" in told
    assert f"{path}: the blanks at the end of 1 passage are left out" in told
    assert f"LAMBADA: accuracy {hits / 2:.6f}, {hits} right of 2 passages, 2 not scored; strict: " in told


def test_mistakes_are_told(load: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {
        "empty": b"",
        "blank": b" \n \n",
        "one": b"a",
        "latin": b"\xe9 a",
        "list.jsonl": b'{"text": "a b"}\n[1]',
        "word.jsonl": b'{"text": "alone"}',
    }
    files = {name: str(tmp_path / name) for name in contents}
    for name, content in contents.items():
        Path(files[name]).write_bytes(content)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "1"]))
    wikitext, lambada = (["--task", name, "--load", str(load)] for name in ("WIKITEXT103", "LAMBADA"))
    good = ["--valid-data", str(text)]
    other = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", files["empty"].replace("empty", "vocab.txt")]
    for words, sentence in (
        (["--task", "WIKITEXT", *good], "--task WIKITEXT: accepted are RACE, MNLI, QQP, WIKITEXT103, LAMBADA"),
        ([*wikitext], "--valid-data is not given"),
        (["--task", "LAMBADA", *good], "--load is not given"),
        ([*wikitext, *good, files["one"]], "one file is evaluated at a time"),
        ([*wikitext, "--valid-data", "nowhere"], "--valid-data nowhere: there is no such file"),
        ([*wikitext, "--valid-data", files["empty"]], "there is no text in it"),
        ([*wikitext, "--valid-data", files["blank"]], "there is no text in it"),
        ([*wikitext, "--valid-data", files["one"]], "it has 1 tokens, and at least 2 are needed"),
        ([*wikitext, "--valid-data", files["latin"]], "it is not UTF-8"),
        ([*wikitext, *good, "--overlapping-eval", "129"], "windows of 128 tokens would leave some out between them"),
        ([*wikitext, *good, "--overlapping-eval", "0"], "--overlapping-eval 0: it must be at least 1"),
        ([*wikitext, *good, "--seq-length", "129"], "--seq-length 129: the model reads 128 tokens at most"),
        ([*wikitext, *good, "--tensor-model-parallel-size", "2"], "it must divide the number of ranks, which is 1"),
        ([*wikitext, *good, *other], "it is not the tokenizer of that model"),
        ([*wikitext[:-1], str(load.parent / "hf"), *good, "--ckpt-step", "3"], "a folder of Hugging Face's, without"),
        ([*lambada, "--valid-data", files["empty"]], "there is no passage in it"),
        ([*lambada, "--valid-data", files["list.jsonl"]], "list.jsonl, line 2: it must be a JSON object"),
        ([*lambada, "--valid-data", files["word.jsonl"]], "no passage in it can be scored"),
    ):
        told = complaints(capsys, [*words, "--distributed-backend", "gloo"], main.main)
        assert any(sentence in one for one in told), told
