"""tools/generate_text.py: from a checkpoint saved at one layout, the same text at another; files; mistakes."""

import builtins
import io
import json
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.model import CachedRows, KeyValueCache
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import NO_NUMBERS
from megatron.tasks.trained import load_gpt, parse_request, stored_config
from tests.harness.ranks import Ranks
from tests.harness.runs import EOD, VOCAB_SIZE, flags, run_pretrain, write_documents

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "generate_text.py"


def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL), run_name="generate_text")


def written(rank: int, world_size: int, load: str, *words: str) -> str | None:
    names = tool()
    asked = ["--load", load, "--distributed-backend", "gloo", *words]
    return names["run"](parse_request(names["Request"], asked, prog="generate_text.py"))


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    data_path = write_documents(folder / "documents")
    words = flags(data_path, tensor_model_parallel_size=2, train_iters=30, lr=1e-2, save=folder / "saved")
    ranks(2, run_pretrain, words)
    return str(folder / "saved")


@pytest.mark.parametrize("words", [("--temperature", "0"), ("--temperature", "0.7", "--top_k", "5", "--top_p", "0.9")])
def test_text_is_the_same_at_every_layout(ranks: Ranks, checkpoints: str, words: tuple[str, ...]) -> None:
    asked = ["--prompt", "1 2 3", "--out-seq-length", "12", *words]
    texts = {t: ranks(t, written, checkpoints, *asked) for t in (1, 2, 4)}
    texts[-2] = ranks(2, written, checkpoints, "--pipeline-model-parallel-size", "2", *asked)
    texts[-1] = ranks(1, written, checkpoints, "--recompute", *asked)
    assert texts[1][0].startswith("1 2 3 ")
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
    texts = [text for name in ("split", "whole") for text in ranks(1, written, str(tmp_path / name), *asked)]
    # three ranks do not divide four layers
    texts += ranks(3, written, str(tmp_path / "whole"), "--pipeline-model-parallel-size", "3", *asked)
    assert len(set(texts)) == 1


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_of_prompts(ranks: Ranks, checkpoints: str, tmp_path: Path) -> None:
    """Each as if it were alone, whatever else is in the file; what an object says beside its prompt stays."""
    source, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    given = [{"prompt": "1 2 3", "id": 7}, {"prompt": "5"}, {"prompt": "4 9 9 9 9 9 9"}]
    source.write_text("\n".join(json.dumps(one) for one in given) + "\n\n")
    asked = ["--sample-input-file", str(source), "--out-seq-length", "12", "--seed", "3"]
    ranks(2, written, checkpoints, *asked, "--sample-output-file", str(output), "--micro-batch-size", "2")
    found = lines(output)
    assert [{k: one[k] for k in ("prompt", "id") if k in one} for one in found] == given
    assert found[2]["finish_reason"] in ("stop", "context")  # 16 tokens are the context
    (alone,) = ranks(1, written, checkpoints, "--prompt", "1 2 3", "--out-seq-length", "12", "--seed", "3")
    assert alone == "1 2 3" + found[0]["text"]
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(b"1 2 3\r\n5\n \n4 9 9 9 9 9 9")  # without a last newline
    ranks(1, written, checkpoints, *asked[:1], str(plain), *asked[2:], "--micro-batch-size", "1")
    assert [one["text"] for one in lines(Path(f"{plain}.out"))] == [one["text"] for one in found]


def test_texts_from_nothing(ranks: Ranks, checkpoints: str, tmp_path: Path) -> None:
    output = tmp_path / "samples.jsonl"
    output.write_text("what was there before")
    asked = ["--num-samples", "5", "--genfile", str(output), "--out-seq-length", "6", "--stop-ids", "3"]
    ranks(1, written, checkpoints, *asked)
    found = lines(output)
    assert len(found) == 5
    assert len({one["text"] for one in found}) > 1
    for one in found:
        ids = one["text"].split()
        assert not {"3", str(EOD)} & set(ids)
        assert len(ids) == one["length"] - (one["finish_reason"] == "stop") <= 6


def test_a_conversation(checkpoints: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts one after another, a wrong one among them, until the input ends."""
    said = iter(["1 2 3", "", "word", " ".join("1" * 17), "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6"])

    def answer(question: str) -> str:
        for words in said:
            return words
        raise EOFError

    monkeypatch.setattr(builtins, "input", answer)
    tool()["main"](["--load", checkpoints, "--greedy", "--out-seq-length", "4", "--distributed-backend", "gloo"])
    told = capsys.readouterr()
    first, second = [line for line in told.out.splitlines() if line]
    assert first.startswith("1 2 3 ") and len(first.split()) <= 7
    assert second.startswith("1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 ") and len(second.split()) <= 17
    wrong, long, *ends = told.err.splitlines()
    assert "not 'word'" in wrong
    assert "the prompt has 17 tokens: the model takes 16 at most" in long
    assert ends == ["the text ends at the model's context of 16 tokens"] * (len(second.split()) == 17)


def test_a_line_that_is_no_utf8_ends_no_conversation(
    checkpoints: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 2\n\xff\n3\n"), encoding="utf-8"))
    tool()["main"](["--load", checkpoints, "--out-seq-length", "0", "--distributed-backend", "gloo"])
    told = capsys.readouterr()
    asked = "prompt (Ctrl-D ends)> "
    assert told.out == f"{asked}1 2\n{asked}{asked}3\n{asked}\n"
    assert re.fullmatch(r"error: .*udcff.*\n", told.err)


def test_flags_of_sizes_and_of_training_mean_nothing_here(checkpoints: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "9", "--seq-length", "1024", "--use-checkpoint-args", "--no-load-optim", "--no-load-rng"]
    asked = ["--load", checkpoints, "--prompt", "1 2", "--out-seq-length", "0", "--distributed-backend", "gloo"]
    tool()["main"]([*asked, *words])
    *ignored, text = capsys.readouterr().out.splitlines()
    assert text == "1 2"
    assert {line.split()[0] for line in ignored} == {word for word in words if word.startswith("--")}


def test_letters_that_the_terminal_lacks_end_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(told, encoding="latin-1"))
    tool()["print_piece"]("é \ufffd")
    assert told.getvalue() == b"\xe9 \\ufffd"


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
    files = {"empty": "", "bad.jsonl": '{"prompt": "1"}\n{"prompt": 2}', "word.jsonl": '{"prompt": "word"}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / name) for name in files}
    (tmp_path / "latin").write_bytes(b"\xe9")
    here = ["--load", checkpoints]
    for words, sentence in (
        (["--load", str(tmp_path), "--prompt", "1"], "there is no checkpoint"),
        ([*here, "--prompt", "1", "--ckpt-step", "3"], "iter_0000003"),
        ([*here, "--prompt", ""], "the prompt is empty"),
        ([*here, "--prompt", " ".join("1" * 17)], "the prompt has 17 tokens: the model takes 16 at most"),
        ([*here, "--prompt", "1", "--stop-ids", "5000"], f"stop token 5000: the vocabulary has ids 0 to {EOD}"),
        ([*here, "--prompt", "1", "--stop", ""], "--stop: a string is empty"),
        ([*here, "--prompt", "1", "--top-k", "-1"], "--top-k -1"),
        ([*here, "--prompt", "1", "--top-p", "2"], "--top-p 2.0: it must be from 0 to 1"),
        ([*here, "--prompt", "1", "--tensor-model-parallel-size", "2"], "must equal the number of ranks"),
        ([*here, "--prompt", "1", "--pipeline-model-parallel-size", "2"], "must equal the number of ranks"),
        (["--prompt", "1"], "--load is not given"),
        ([*here, "--prompt", "1", "--sequence-parallel"], "--sequence-parallel: it is for training"),
        ([*here, "--prompt", "1", "--num-samples", "2"], "--prompt and --num-samples: choose one of them"),
        ([*here, "--num-samples", "2"], "--num-samples and --genfile: one needs the other"),
        ([*here, "--sample-input-file", str(tmp_path / "none")], "there is no such file"),
        ([*here, "--sample-input-file", files["empty"]], "there is no prompt in it"),
        ([*here, "--sample-input-file", files["bad.jsonl"]], "bad.jsonl, line 2: it must be a JSON object"),
        ([*here, "--sample-input-file", files["word.jsonl"]], "not 'word'"),
        ([*here, "--sample-input-file", str(tmp_path / "latin")], "it is not UTF-8"),
        ([*here, "--sample-input-file", files["empty"], "--sample-output-file", files["empty"]], "file of the prompts"),
        (
            [*here, "--num-samples", "2", "--genfile", str(tmp_path / "none" / "x")],
            f"--genfile {tmp_path}/none/x: it must be",
        ),
        ([*here, "--prompt", "1", "--vocab-size", "50"], "--vocab-size is not known"),
        ([*here, "--prompt", "1", "--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file and --merge-file"),
        ([*here, "--prompt", "1", *other_tokenizer(tmp_path)], f"has {VOCAB_SIZE}: it is not the tokenizer of"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*words, "--distributed-backend", "gloo"])
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "bad.jsonl.out").exists()


def test_a_model_that_gives_no_numbers_is_told(
    checkpoints: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a conversation one goes on to the next prompt."""

    def nothing(self: SplitGPT, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> torch.Tensor:
        return torch.full((len(tokens), self.vocab_size), torch.nan)

    monkeypatch.setattr(SplitGPT, "logits", nothing)
    here = ["--load", checkpoints, "--distributed-backend", "gloo"]
    with pytest.raises(SystemExit) as caught:
        tool()["main"]([*here, "--prompt", "1 2"])
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("1 2\n", f"error: --load {checkpoints}: {NO_NUMBERS}\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n"))
    tool()["main"](here)
    told = capsys.readouterr()
    asked = "prompt (Ctrl-D ends)> "
    assert (told.out, told.err) == (f"{asked}1\n{asked}2\n{asked}\n", f"error: {NO_NUMBERS}\n" * 2)


def test_memory_that_does_not_suffice_ends_a_conversation(
    checkpoints: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For it may be that of one rank alone, without which the others cannot go on."""

    def full(self: SplitGPT, rows: int, columns: int) -> KeyValueCache:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(SplitGPT, "new_cache", full)
    monkeypatch.setattr(sys, "stdin", io.StringIO("word\n1\n2\n"))
    with pytest.raises(SystemExit) as caught:
        tool()["main"](["--load", checkpoints, "--distributed-backend", "gloo"])
    assert caught.value.code == 2
    told = capsys.readouterr()
    asked = "prompt (Ctrl-D ends)> "
    assert told.out == f"{asked}{asked}1\n"
    wrong, memory = told.err.splitlines()
    assert "not 'word'" in wrong
    assert "there is not enough memory for the keys and values of 1 texts" in memory


def other_tokenizer(folder: Path) -> list[str]:
    """Flags of a tokenizer that is not the checkpoint's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "1"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(folder / "vocab.txt")]
