"""What stands in the folder that a conversion writes to stays as it is where it is refused, or fails."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.convert import hugging_face, native
from tests.harness.classic_files import Layout, write_classic
from tests.unit.test_convert_classic import ARGS, CONFIG, random
from tools import convert_checkpoint

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A GPT with its tokenizer to be converted; `--to` and `--save` are to be added."""
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS))
    files = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt")]
    return ["--from", "megatron", "--load", str(tmp_path / "theirs"), *files, "--activation", "gelu_erf"]


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


TAKEN = {
    "native": "latest_checkpointed_iteration.txt",
    # Without a tracker: one of the same iteration would take its place.
    "native of no tracker": "iter_0000007/index.json",
    "native and other words": "tokenizer/vocab.txt",
    "hf": "config.json",
    "hf and other words": "vocab.txt",
    "hf and another description": "tokenizer_config.json",
}


@pytest.mark.parametrize("what", TAKEN)
def test_a_refused_conversion_leaves_all_as_it_was(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    target = tmp_path / "target"
    for name in (TAKEN[what], "tokenizer/other"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("the user's own")
    before = contents(target)
    assert convert_checkpoint.main([*words, "--to", what.split()[0], "--save", str(target)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "already" in complaint and str(target) in complaint
    assert contents(target) == before


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_a_conversion_that_fails_takes_away_what_it_made(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The disk is full at the last file. Afterwards the same goes through, beside what was there."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    asked, target = [*words, "--to", kind, "--save", str(tmp_path / "target" / "in")], tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(native, "publish", full)
        patch.setattr(hugging_face.json, "dump", full)
        assert convert_checkpoint.main(asked) == 2
        assert not target.exists()
        (target / "in").mkdir(parents=True)
        (target / "in" / "notes").write_text("the user's own")
        assert convert_checkpoint.main(asked) == 2
    assert [path.name for path in target.rglob("*")] == ["in", "notes"]
    assert convert_checkpoint.main(asked) == 0
    assert (target / "in" / "notes").read_text() == "the user's own"
    copy = target / "in" / ("tokenizer/vocab.txt" if kind == "native" else "vocab.txt")
    assert copy.read_bytes() == (tmp_path / "vocab.txt").read_bytes()


def test_a_tokenizer_that_lies_in_the_target_already(tmp_path: Path, words: list[str]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "vocab.txt").rename(target / "vocab.txt")
    moved = [word.replace(str(tmp_path / "vocab"), str(target / "vocab")) for word in words]
    assert convert_checkpoint.main([*moved, "--to", "hf", "--save", str(target)]) == 0
    assert (target / "model.safetensors").is_file()
    assert (target / "vocab.txt").read_text().split() == TOKENS
