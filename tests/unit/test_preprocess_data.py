"""Tools that make a corpus: preprocess_data.py and train_tokenizer.py, from text to token files and back."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from tools import preprocess_data, train_tokenizer

TEXTS = [f"Document {i}: " + "the quick brown fox, " * (i % 7) + "caf\u00e9 \U0001f600.\n" for i in range(60)]


def write_jsonl(path: Path, texts: list[str], **more: str) -> Path:
    lines = [json.dumps({"text": text, **more}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer trained on the texts."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_jsonl(folder / "corpus.jsonl", TEXTS)
    words = ["--input", str(corpus), "--vocab-size", "290", "--output-dir", str(folder / "tokenizer")]
    assert train_tokenizer.main(words) == 0
    return folder / "tokenizer"


def tokenizer_flags(folder: Path) -> list[str]:
    return ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]


def tokenizer_of(folder: Path) -> Tokenizer:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer(TokenizerConfig(**files))  # type: ignore[arg-type]


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def test_a_trained_tokenizer_is_of_the_size_asked_and_ends_with_the_end_of_text(trained: Path) -> None:
    tokenizer = tokenizer_of(trained)
    assert (tokenizer.vocab_size, tokenizer.eod) == (290, 289)
    ids = tokenizer.tokenize_batch(TEXTS)
    assert [tokenizer.detokenize(document) for document in ids] == TEXTS
    assert sum(map(len, ids)) < sum(len(text.encode()) for text in TEXTS) / 2
    vocabulary = json.loads((trained / "vocab.json").read_text(encoding="utf-8"))
    assert sorted(vocabulary.values()) == list(range(290))
    assert len((trained / "merges.txt").read_text(encoding="utf-8").splitlines()) == 1 + 290 - 257


def test_training_twice_gives_the_same_files_and_plain_text_is_read(tmp_path: Path, trained: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(TEXTS), encoding="utf-8")
    words = ["--vocab-size", "290", "--output-dir", str(tmp_path / "again")]
    assert train_tokenizer.main(["--input", str(plain), *words]) == 0
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_training_complains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "tokenizer"
    assert train_tokenizer.main(["--input", "nowhere", "--output-dir", str(target), "--vocab-size", "256"]) == 2
    told = capsys.readouterr().err
    assert "--input nowhere: there is no such file" in told
    assert "--vocab-size 256: it must be at least 257" in told
    (tmp_path / "bad.jsonl").write_bytes(b'{"title": "x"}\n\n{"text": "\xff"}\n')
    assert train_tokenizer.main(["--input", str(tmp_path / "bad.jsonl"), "--output-dir", str(target)]) == 2
    told = capsys.readouterr().err
    assert "no text to learn from" in told
    assert "1 key missing: " in told
    assert "bad.jsonl:1" in told
    assert "Traceback" not in told
    assert not target.exists()


def test_a_file_in_the_place_of_the_folder_that_is_written_into_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "x.txt"
    text.write_text("1\n")
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    why = f"it cannot be written, for {text} is no folder"
    assert train_tokenizer.main(["--input", str(text), "--output-dir", str(text)]) == 2
    assert capsys.readouterr().err == f"error: --output-dir {text}: {why}\n"
    assert preprocess_data.main(["--input", str(text), "--output-prefix", str(text / "set"), *numbers]) == 2
    assert capsys.readouterr().err == f"error: --output-prefix {text / 'set'}: {why}\n"
    assert text.read_text() == "1\n"


def test_more_ids_than_can_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("3000000000\n")
    words = ["--input", str(tmp_path / "x.txt")]
    for many, most in (("10000001", "at most 10000000"), ("99999999999999999999999", "a whole number of 64 bits")):
        assert train_tokenizer.main([*words, "--output-dir", str(tmp_path / "new"), "--vocab-size", many]) == 2
        assert capsys.readouterr().err == f"error: --vocab-size {many}: it must be {most}\n"
    words += ["--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "NullTokenizer", "--vocab-size"]
    assert preprocess_data.main([*words, "99999999999"]) == 2
    assert "--vocab-size 99999999999: it must be at most 2147483648" in capsys.readouterr().err
    (tmp_path / "x.txt").write_text("2147483647\n")
    assert preprocess_data.main([*words, str(2**31)]) == 0
    assert documents_of(tmp_path / "x_text_document") == [[2**31 - 1]]


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, target = write_jsonl(tmp_path / "x.jsonl", TEXTS), tmp_path / "new" / "tokenizer"
    flush = os.fsync

    def full(descriptor: int) -> None:
        flush(descriptor)
        if ".merges.txt" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = ["--input", str(corpus), "--vocab-size", "290", "--output-dir", str(target)]
    assert train_tokenizer.main(words) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("kind", ["one letter", "blanks", "many words between"])
def test_training_ends_on_a_word_of_3_mb(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"one letter": "a" * 3_000_000, "blanks": "b" + "\t" * 3_000_000 + "b"}.get(
        kind, "the fox " * 1000 + "x" * 2500 + " the fox" * 1000
    )
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    began = time.process_time()
    words = ["--input", str(tmp_path / "x.txt"), "--vocab-size", "300", "--output-dir", str(tmp_path / "t")]
    assert train_tokenizer.main(words) == 0
    assert time.process_time() - began < 20
    assert "cut 1 words of more than 1000 characters" in capsys.readouterr().out
    read = train_tokenizer.Read()
    parts = list(train_tokenizer.with_words_cut(text, read))
    assert "".join(parts) == text
    assert max(len(run) for part in parts for run in re.findall(r"\S+|\s+", part)) == 1000
    merges = (tmp_path / "t" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert {"one letter": "a a", "blanks": "\u0109 \u0109"}.get(kind, "x x") in merges


def test_words_of_up_to_1000_characters_are_not_cut(tmp_path: Path) -> None:
    for text in ("a" * 1000, f"b {'a' * 1000}  {' ' * 990}" * 5, "", "\u00e9" * 999 + "\u2003" * 1000):
        read = train_tokenizer.Read()
        assert list(train_tokenizer.with_words_cut(text, read)) == [text]
        assert read.cut_words == 0


def test_workers_write_the_same_files_as_this_process(tmp_path: Path, trained: Path) -> None:
    many = [text * 20 for text in TEXTS] * 8  # more than one chunk
    corpus = write_jsonl(tmp_path / "corpus.jsonl", many)
    for workers in ("1", "2"):
        words = ["--input", str(corpus), "--output-prefix", str(tmp_path / f"out{workers}"), "--workers", workers]
        assert preprocess_data.main([*words, "--append-eod", *tokenizer_flags(trained)]) == 0
    ids = tokenizer_of(trained).tokenize_batch(many)
    assert documents_of(tmp_path / "out1_text_document") == [[*document, 289] for document in ids]
    for extension in ("bin", "idx"):
        first, second = ((tmp_path / f"out{n}_text_document.{extension}").read_bytes() for n in (1, 2))
        assert first == second


def test_runs_as_a_script_with_a_progress_bar(tmp_path: Path, trained: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    script = Path(preprocess_data.__file__)
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "new/out"), *tokenizer_flags(trained)]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--dataset-impl", "mmap", "--log-interval", "10"]
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "B/s" in done.stderr
    assert "documents/s" in done.stderr
    assert "out_text_document.bin: 60 documents" in done.stdout
    assert documents_of(tmp_path / "new/out_text_document") == tokenizer_of(trained).tokenize_batch(TEXTS)


def test_each_key_has_its_own_output_and_they_stay_in_step(tmp_path: Path, trained: Path) -> None:
    lines = [json.dumps({"text": f"body {i}", "title": f"title {i}"}) for i in range(5)]
    lines[2] = json.dumps({"text": "body 2"})  # no title: skipped for both
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "x"), *tokenizer_flags(trained)]
    assert preprocess_data.main([*words, "--json-keys", "title", "text"]) == 0
    for key, word in (("text", "body"), ("title", "title")):
        texts = [f"{word} {i}" for i in (0, 1, 3, 4)]
        assert documents_of(tmp_path / f"x_{key}_document") == tokenizer_of(trained).tokenize_batch(texts)


def test_bad_lines_are_skipped_and_counted(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps({"text": "good"}).encode()
    bad = [b"", b"{", b"[1]", b"{}", b'{"text": 1}', b'{"text": ""}', b'{"text": "\xfe"}', b'{"text": "\\udc00"}', b"{"]
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, *bad, good]))
    words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "x")]
    assert preprocess_data.main([*words, *tokenizer_flags(trained)]) == 0
    assert documents_of(tmp_path / "x_text_document") == [tokenizer_of(trained).tokenize("good")] * 2
    told = capsys.readouterr().out.splitlines()
    name = tmp_path / "x.jsonl"
    assert "skipped 9 bad records" in told
    assert f"  2 empty: {name}:2, {name}:7" in told
    assert f"  2 cut off before its end: {name}:3, {name}:10" in told
    for kind, line in (
        ("not a JSON object", 4),
        ("key missing", 5),
        ("not a string", 6),
        ("not UTF-8", 8),
        ("lone surrogate, which is no character", 9),
    ):
        assert f"  1 {kind}: {name}:{line}" in told


def test_text_that_the_tokenizer_refuses_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", ["1 2 3", "four", "99", "  ", "0 9"])
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--append-eod"]
    assert preprocess_data.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]) == 0
    assert documents_of(tmp_path / "x_text_document") == [[1, 2, 3, 9], [0, 9, 9]]
    places = ", ".join(f"{corpus}:{line}" for line in (2, 3, 4))
    assert f"  3 not understood by the tokenizer: {places}" in capsys.readouterr().out


def test_a_large_vocabulary_takes_wider_elements(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", ["65535 70000"])
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "NullTokenizer"]
    assert preprocess_data.main([*words, "--vocab-size", "80000"]) == 0
    dataset = IndexedDataset(tmp_path / "x_text_document")
    assert dataset.dtype == np.int32
    assert dataset.get(0).tolist() == [65_535, 70_000]


def test_complaints_come_together_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", "nowhere", "--output-prefix", str(tmp_path / "new/x"), "--workers", "0", "--split-sentence"]
    assert preprocess_data.main([*words, "--json-keys", "a", "a", "b/c", "--dataset-impl", "lazy"]) == 2
    told = capsys.readouterr().err
    for part in (
        "--input nowhere: there is no such file",
        "--workers 0: it must be at least 1",
        "--split-sentence is not known",
        "--json-keys a a b/c: the same key twice",
        "--json-keys b/c: a key becomes part of a file's name, which takes no /",
        "--dataset-impl lazy: accepted are mmap",
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
    ):
        assert part in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["--workers", "2", "--partitions", "2"]])
@pytest.mark.parametrize("content", [b"", b"{\n"])
def test_a_refused_run_leaves_no_folder(
    tmp_path: Path, trained: Path, more: list[str], content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "new" / "deep" / "x"), *more]
    assert preprocess_data.main([*words, *tokenizer_flags(trained)]) == 2
    assert "there is no usable document" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_leaves_the_old_set(
    tmp_path: Path, trained: Path, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output-prefix", str(tmp_path / "x"), "--workers", workers, *tokenizer_flags(trained)]
    corpus = write_jsonl(tmp_path / "x.jsonl", ["old"])
    assert preprocess_data.main(["--input", str(corpus), *words]) == 0
    (tmp_path / "empty.jsonl").write_text("{\n", encoding="utf-8")
    assert preprocess_data.main(["--input", str(tmp_path / "empty.jsonl"), *words]) == 2
    told = capsys.readouterr().err
    assert "there is no usable document" in told
    assert "1 cut off before its end: " in told
    assert documents_of(tmp_path / "x_text_document") == [tokenizer_of(trained).tokenize("old")]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x.jsonl", "empty.jsonl", "x_text_document.bin", "x_text_document.idx"}


def test_an_end_of_document_that_the_tokenizer_lacks_is_told_before_anything(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = json.loads((trained / "vocab.json").read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    corpus = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--append-eod", "--workers", "2"]
    words += ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(trained / "merges.txt")]
    assert preprocess_data.main(words) == 2
    assert "no end-of-document token" in capsys.readouterr().err
    assert not list(tmp_path.glob("*_document*"))


@pytest.mark.parametrize("more", [[], ["--partitions", "3"]])
def test_a_worker_that_dies_ends_the_run(
    tmp_path: Path, trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    monkeypatch.setattr(preprocess_data, "handed_over", lambda encoder: functools.partial(os._exit, 9))
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--workers", "2"]
    assert preprocess_data.main([*words, *more, *tokenizer_flags(trained)]) == 1
    told = capfd.readouterr().err
    assert "a worker process died" in told
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("more", [[], ["--partitions", "3"]])
def test_what_keeps_workers_from_starting_is_told(
    tmp_path: Path, trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    missing = functools.partial(tokenizer_of, tmp_path / "nowhere")
    monkeypatch.setattr(preprocess_data, "handed_over", lambda encoder: missing)
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--workers", "2"]
    assert preprocess_data.main([*words, *more, *tokenizer_flags(trained)]) == 2
    told = capfd.readouterr().err
    assert "vocab.json cannot be read: No such file or directory" in told
    assert "Traceback" not in told
    assert not list(tmp_path.glob("*x_text*"))


@pytest.mark.parametrize("more", [[], ["--partitions", "3"]])
def test_the_tokenizer_is_read_once(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    copies = tmp_path / "tokenizer"
    shutil.copytree(trained, copies)
    write_all = preprocess_data.write_all

    def lose_files(*arguments: Any) -> Any:
        shutil.rmtree(copies)
        return write_all(*arguments)

    monkeypatch.setattr(preprocess_data, "write_all", lose_files)
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--workers", "2"]
    assert preprocess_data.main([*words, *more, *tokenizer_flags(copies)]) == 0
    assert documents_of(tmp_path / "x_text_document") == tokenizer_of(trained).tokenize_batch(TEXTS)
