"""merge_datasets.py and inspect_dataset.py: what they write, what they say, what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from tests.harness.token_files import write_token_files
from tools import inspect_dataset, merge_datasets

FIRST = [[[1, 2, 3], [4]], [[5]]]
SECOND = [[[6, 7]], [[], [8]]]


def sets(folder: Path) -> list[str]:
    return [write_token_files(folder / "b", FIRST), write_token_files(folder / "a", SECOND)]


@pytest.mark.parametrize("by", ["names", "folder"])
def test_merging(tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    names = sets(tmp_path / "in")
    inputs, documents = (names, FIRST + SECOND) if by == "names" else ([str(tmp_path / "in")], SECOND + FIRST)
    assert merge_datasets.main(["--input", *inputs, "--output-prefix", str(tmp_path / "new/out")]) == 0
    write_token_files(tmp_path / "expected", documents)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"new/out.{ending}").read_bytes() == (tmp_path / f"expected.{ending}").read_bytes()
    assert "4 documents in 6 sequences, 8 tokens of uint16 from 2 sets" in capsys.readouterr().out


def test_merging_complains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sets(tmp_path)
    (tmp_path / "empty").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    words = ["--input", first, str(tmp_path / "empty"), first, "--output-prefix", first]
    assert merge_datasets.main(words) == 2
    told = capsys.readouterr().err
    assert f"--input {tmp_path / 'empty'}: the folder holds no token set" in told
    assert f"--input {first}: it is named twice" in told
    assert f"--output-prefix {first}: it is one of the inputs" in told

    again = f"{tmp_path}/../{tmp_path.name}/b"
    assert merge_datasets.main(["--input", first, again, "--output-prefix", str(tmp_path / "out")]) == 2
    assert f"--input {again}: it is named twice" in capsys.readouterr().err

    wide = write_token_files(tmp_path / "wide", FIRST, 4)
    (tmp_path / "a.bin").write_bytes(b"\0")
    words = ["--input", first, second, wide, str(tmp_path / "none"), "--output-prefix", str(tmp_path / "out")]
    assert merge_datasets.main(words) == 2
    told = capsys.readouterr().err
    assert "a.bin has 1 bytes, its index describes 6" in told
    assert "none.idx is missing" in told
    assert "wide holds int32" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "wide.bin", "wide.idx"])


def test_inspecting_counts_and_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [[[1] * size] for size in (0, 1, 2, 3, 3, 4, 7, 8)]
    prefix = write_token_files(tmp_path / "x", documents)
    assert inspect_dataset.main(["--data-path", prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{prefix}: 8 documents, 8 sequences, 28 tokens of uint16"
    assert lines[1] == "largest id 1"
    assert lines[2].startswith("tokens of a sequence: 0 to 8, mean 3.5, median 3")
    assert lines[2].endswith("1 are empty")
    assert [line.split()[:2] for line in lines[3:]] == [
        ["0", "1"],
        ["1", "1"],
        ["2-3", "3"],
        ["4-7", "2"],
        ["8-15", "1"],
    ]


def test_inspecting_documents_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_token_files(tmp_path / "x", FIRST + SECOND)
    flags = ["--data-path", prefix, "--documents", "2", "--first-document", "1", "--samples", "9", "--seq-length", "3"]
    assert inspect_dataset.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:-2] == ["document 1: 5", "document 2: 6 7"]
    numbers = [word.split(":") for word in lines[-2:]]
    assert [name for name, _ in numbers] == ["sample 0", "sample 1"]
    seen = [list(map(int, ids.split())) for _, ids in numbers]
    assert sorted(sum(seen, [])) == sorted(set(sum(seen, []))) and all(len(ids) == 3 for ids in seen)
    assert inspect_dataset.main([*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]) == 0
    assert "document 2: '6 7'" in capsys.readouterr().out


def test_inspecting_sentences_and_long_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1, 2], [3]], [list(range(300))]])
    assert inspect_dataset.main(["--data-path", prefix, "--documents", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:-1] == ["document 0: 2 sequences", "  1 2", "  3"]
    assert lines[-1].endswith("198 199 ... (300 tokens)")


def test_inspecting_an_empty_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_token_files(tmp_path / "x", [])
    assert inspect_dataset.main(["--data-path", prefix]) == 0
    assert "0 documents, 0 sequences, 0 tokens" in capsys.readouterr().out


def test_inspecting_complains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_token_files(tmp_path / "x", FIRST)
    for more, message in (
        (["--documents", "-1"], "--documents -1: it must be at least 0"),
        (["--documents", "1", "--first-document", "2"], "--first-document 2: there are 2 documents, counted from 0"),
        (["--seed", "4294967296"], "--seed 4294967296: it must be at least 0 and below 4294967296"),
        (["--vocab-file", "v"], "--vocab-file v: give --tokenizer-type as well"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file and --merge-file"),
        (["--samples", "1", "--seq-length", "50"], "one sample of --seq-length 50 takes 51"),
    ):
        assert inspect_dataset.main(["--data-path", prefix, *more]) == 2
        assert message in capsys.readouterr().err
    assert inspect_dataset.main(["--data-path", prefix + ".bin"]) == 2
    assert "give the name without .bin" in capsys.readouterr().err
    assert np.array_equal(IndexedDataset(prefix).sizes, [3, 1, 1])


def test_inspecting_ends_quietly_when_nobody_reads_on(tmp_path: Path, repository: Path) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1]]] * 20_000)
    command = [sys.executable, str(repository / "tools/inspect_dataset.py"), "--data-path", prefix, "--documents"]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen([*command, "20000"], stdout=-1, stderr=-1, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().endswith(b"tokens of uint16\n")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
