"""`--padded-vocab-size`: rows beyond the tokenizer's ids are weights as the others at any layout, never text."""

from pathlib import Path

import pytest

from megatron.checkpointing.convert import from_native
from megatron.model import GPTModel
from megatron.mpu import SERIAL_GROUP
from megatron.training.stored import model_differences
from tests.functional.test_generate_text import written
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, flags, reporting, run_pretrain, write_documents
from tools import convert_checkpoint

# Of 100 ids; on four tensor ranks 144 rows, the last 8 of which are no weights.
ROWS = 136
CHOSEN = {"train_iters": 4, "lr": 1e-2, "eval_interval": 4, "make_vocab_size_divisible_by": 12}


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("data") / "documents"))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, data_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], Path]:
    folder = tmp_path_factory.mktemp("run") / "saved"
    words = flags(data_path, padded_vocab_size=ROWS, tensor_model_parallel_size=4, save=folder, **CHOSEN)
    return ranks(4, run_pretrain, words), folder


def test_padding_is_trained_as_tokens_are(ranks: Ranks, data_path: str, saved: tuple[list[Outcome], Path]) -> None:
    """As by a run whose tokenizer has as many ids, and by one with other ranks."""
    tokens = ranks(1, run_pretrain, flags(data_path, vocab_size=ROWS, **CHOSEN))[0]
    padded = ranks(1, run_pretrain, flags(data_path, padded_vocab_size=ROWS, **CHOSEN))[0]
    assert padded.series("loss") == tokens.series("loss")
    assert padded.evaluations == tokens.evaluations
    staged = ranks(2, run_pretrain, flags(data_path, padded_vocab_size=ROWS, pipeline_model_parallel_size=2, **CHOSEN))
    for outcomes in (staged, saved[0]):
        assert_close(reporting(outcomes).series("loss"), padded.series("loss"), 1e-5)
        words = assemble(outcomes)["embedding.word_embeddings.weight"]
        assert_close(words, assemble([padded])["embedding.word_embeddings.weight"], 1e-3)
        assert words.shape[0] == ROWS and words[100:].abs().sum() > 0
    plain = ranks(1, run_pretrain, flags(data_path, **CHOSEN))[0]
    assert all(loss < more for loss, more in zip(plain.series("loss"), padded.series("loss"), strict=True))


def test_only_ids_of_the_tokenizer_are_written(ranks: Ranks, saved: tuple[list[Outcome], Path]) -> None:
    """So hot that about one token in four would be padding."""
    asked = ["--prompt", "1 2 3", "--out-seq-length", "40", "--temperature", "50"]
    texts = {text for t in (1, 2) for text in ranks(t, written, str(saved[1]), *asked)}
    assert len(texts) == 1
    assert max(map(int, texts.pop().split())) < 100


def test_another_size_is_refused_by_name(ranks: Ranks, data_path: str, saved: tuple[list[Outcome], Path]) -> None:
    found = from_native(saved[1])
    assert (found.config.padded_vocab_size, found.vocab_size) == (ROWS, 100)
    stored = found.model().signature()
    plain = GPTModel(found.without_padding().config, 100, group=SERIAL_GROUP, device="meta").signature()
    assert model_differences(stored, plain, "there") == [
        f"--padded-vocab-size None: the model of the checkpoint in there has {ROWS}"
    ]
    # What is stored by a version that does not know of it has no such rows.
    older = {name: value for name, value in plain.items() if name != "padded_vocab_size"}
    assert model_differences(older, plain, "there") == []
    with pytest.raises(RuntimeError, match="--padded-vocab-size 99: it must be at least 100"):
        ranks(1, run_pretrain, flags(data_path, padded_vocab_size=99, **CHOSEN))


def test_export_has_the_tokens_alone_or_all_rows(
    tmp_path: Path, saved: tuple[list[Outcome], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without padding by default: whoever samples from it gets tokens. With it, a way back."""
    native = from_native(saved[1]).weights
    for words, rows in (([], 100), (["--keep-padding"], ROWS)):
        there, back = str(tmp_path / f"there{rows}"), str(tmp_path / f"back{rows}")
        out = ["--from", "native", "--to", "hf", "--load", str(saved[1]), "--save", there, "--check", *words]
        assert convert_checkpoint.main(out) == 0
        assert ("left out: --keep-padding" in capsys.readouterr().out) == (rows == 100)
        again = ["--from", "hf", "--to", "native", "--load", there, "--save", back, "--vocab-size", "100", *words]
        assert convert_checkpoint.main([*again, "--check"]) == 0
        assert (f"--padded-vocab-size {ROWS}" in capsys.readouterr().out) == (rows == ROWS)
        returned = from_native(Path(back))
        for name, tensor in returned.weights.items():
            expected = native[name].read()
            assert tensor.read().equal(expected[:rows] if "word_embeddings" in name else expected), name
        assert returned.vocab_size == 100
