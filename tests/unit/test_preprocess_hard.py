"""preprocess_data.py on hard input: all formats, bad records, huge documents, parts, kills."""

import contextlib
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.compression import zstd
from megatron.data.indexed import IndexedDataset
from tools import preprocess_data

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
GOOD = '{"text": "1 2"}'
BAD = {
    b'{"text": "1}': "cut off before its end",
    b'{"text" "1"}': "not valid JSON",
    b'["1"]': "not a JSON object",
    b'{"body": "1"}': "key missing",
    b'{"text": ["1"]}': "not a string",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\\ud800"}': "lone surrogate, which is no character",
    b'{"text": ""}': "empty",
    b"": "empty",
    b'{"text": "one"}': "not understood by the tokenizer",
}


def run(
    folder: Path, inputs: Sequence[Path | str], *more: str, tokenizer: Sequence[str] = NULL, prefix: str = "x"
) -> int:
    words = ["--input", *map(str, inputs), "--output-prefix", str(folder / prefix), *tokenizer, *more]
    return preprocess_data.main(words)


def documents(prefix: Path) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    starts = dataset.document_indices.tolist()
    return [[dataset.get(i).tolist() for i in range(a, b)] for a, b in zip(starts, starts[1:], strict=False)]


def both_files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("more", [[], ["--partitions", "4", "--workers", "2"]])
def test_all_formats_at_once_in_their_order(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{i} {i + 1}" for i in range(600)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:100]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[100:200]).encode()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress("\n".join(lines[200:300]).encode()))
    (tmp_path / "d.txt.xz").write_bytes(lzma.compress("\r\n".join(texts[300:400]).encode()))
    (tmp_path / "e.txt").write_text("\n".join(texts[400:500]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[500:]}), tmp_path / "f.parquet", row_group_size=30)
    assert run(tmp_path, [tmp_path / "[a-f].*"], *more) == 0
    assert documents(tmp_path / "x_text_document") == [[[int(i) for i in text.split()]] for text in texts]
    assert "600 documents, 1,200 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("partitions", ["1", "5"])
def test_every_kind_of_bad_record_is_counted_with_its_place(
    tmp_path: Path, workers: str, partitions: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line for bad in BAD for line in (GOOD.encode(), bad)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert run(tmp_path, [tmp_path / "in.jsonl"], "--workers", workers, "--partitions", partitions) == 0
    assert documents(tmp_path / "x_text_document") == [[[1, 2]]] * len(BAD)
    told, errors = capfd.readouterr()
    assert f"skipped {len(BAD)} bad records" in told
    for kind in set(BAD.values()):
        numbers = [lines.index(bad) + 1 for bad, named in BAD.items() if named == kind]
        places = ", ".join(f"{tmp_path / 'in.jsonl'}:{number}" for number in numbers)
        assert f"  {len(numbers)} {kind}: {places}" in told.splitlines()
    assert "Traceback" not in errors


# With processes two kinds are enough: one that the reader sees and one of the tokenizer.
@pytest.mark.parametrize(
    ("bad", "more"),
    [(bad, []) for bad in BAD]
    + [(b"", ["--workers", "2"])]
    + [(bad, ["--workers", "2", "--partitions", "3"]) for bad in (b"", b'{"text": "one"}')],
)
def test_the_first_bad_record_can_stop_it(
    tmp_path: Path, bad: bytes, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([GOOD.encode()] * 40 + [bad] + [GOOD.encode()] * 3 + [b"{"]))
    assert run(tmp_path, [tmp_path / "in.jsonl"], "--on-bad-record", "fail", *more) == 2
    told = capfd.readouterr().err
    assert f"error: {tmp_path / 'in.jsonl'}:41: {BAD[bad]}" in told
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("more", [[], ["--workers", "2"], ["--workers", "2", "--partitions", "3"]])
def test_a_compressed_file_that_is_cut_short_stops_it(
    tmp_path: Path, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    data = "\n".join(json.dumps({"text": f"{i % 1000} {i * 7919 % 1000}"}) for i in range(50_000)).encode()
    for ending, packed in ((".gz", gzip.compress(data)), (".xz", lzma.compress(data)), (".zst", zstd.compress(data))):
        path = tmp_path / f"in.jsonl{ending}"
        path.write_bytes(packed[:-20])
        assert run(tmp_path, [path], *more) == 2
        told = capfd.readouterr().err
        assert f"error: {path} is cut short or damaged: " in told
        assert "Traceback" not in told
    assert not list(tmp_path.glob("*x_text*"))


def test_partitions_give_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(5)
    lines = []
    for _ in range(3000):
        words = " ".join(str(chance.randrange(1000)) for _ in range(chance.randrange(12)))
        lines.append(json.dumps({"text": words, "title": "7"}) if chance.random() > 0.1 else "{")
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:1000]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[1000:]))
    told = set()
    for name, more in (("1", []), ("2", ["--partitions", "2"]), ("7", ["--partitions", "7", "--workers", "2"])):
        inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        assert run(tmp_path, inputs, "--append-eod", "--json-keys", "text", "title", *more, prefix=name) == 0
        told.add("\n".join(capsys.readouterr().out.replace(f"/{name}_", "/_").splitlines()))
        for key in ("text", "title"):
            assert both_files(tmp_path / f"{name}_{key}_document") == both_files(tmp_path / f"1_{key}_document")
    assert len(told) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".bin", ".idx"}


def test_sentences_become_sequences(tmp_path: Path, trained: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["Dr. Smith came. He left at 5 p.m. on Monday.\n\nHeading", "One.", " \n "]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run(tmp_path, [tmp_path / "in.jsonl"], "--split-sentences", "--append-eod", tokenizer=trained) == 0
    tokenizer = preprocess_data.build_tokenizer(
        preprocess_data.TokenizerConfig(vocab_file=trained[1], merge_file=trained[3])
    )
    found = documents(tmp_path / "x_text_sentence")
    assert [[tokenizer.detokenize(ids) for ids in document] for document in found] == [
        ["Dr. Smith came.", "He left at 5 p.m. on Monday.", "Heading<|endoftext|>"],
        ["One.<|endoftext|>"],
    ]
    told = capsys.readouterr().out
    assert "2 documents in 4 sentences" in told
    assert f"  1 not understood by the tokenizer: {tmp_path / 'in.jsonl'}:3" in told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Flags of a tokenizer of GPT-2's kind with a small vocabulary."""
    from tools import train_tokenizer

    folder = tmp_path_factory.mktemp("trained")
    (folder / "x.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 5)
    words = ["--input", str(folder / "x.txt"), "--vocab-size", "300", "--output-dir", str(folder)]
    assert train_tokenizer.main(words) == 0
    return ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]


ODD = {
    "NUL bytes": "a\x00b\x00\x00c",
    "line separators": "one\u2028two\u2029three\x85four\x0bfive",
    "CRLF": "one\r\ntwo\rthree\n\r",
    "byte order mark": "\ufeffone\ufeff",
    "beyond the basic plane": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U00010348",
    "name of a special token": "<|endoftext|>",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_odd_characters_go_through(tmp_path: Path, trained: Sequence[str], odd: str, ascii_only: bool) -> None:
    texts = [ODD[odd], "plain", f"the {ODD[odd]} fox"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts)
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n")
    assert run(tmp_path, [tmp_path / "in.jsonl"], tokenizer=trained) == 0
    tokenizer = preprocess_data.build_tokenizer(
        preprocess_data.TokenizerConfig(vocab_file=trained[1], merge_file=trained[3])
    )
    assert [tokenizer.detokenize(ids) for (ids,) in documents(tmp_path / "x_text_document")] == texts


# Prints the exit code and the most memory held above the start, by this process and by the largest of its workers.
# `ru_maxrss` of this process would begin with what its parent held before it became this program.
MEASURED = """
import re, resource, sys
from tools import preprocess_data
if __name__ == "__main__":
    held = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    before = held()
    code = preprocess_data.main(sys.argv[1:])
    print("measured", code, held() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def measured(folder: Path, repository: Path, words: Sequence[str]) -> tuple[int, int, int]:
    (folder / "measured.py").write_text(MEASURED, encoding="utf-8")
    command = [sys.executable, str(folder / "measured.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(repository), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in done.stderr
    code, own, workers = done.stdout.splitlines()[-1].split()[1:]
    return int(code), int(own), int(workers)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("document of 50 MB", "2"), ("word of 1 MB", "1")])
def test_huge_documents_take_less_than_1_gib(
    tmp_path: Path, trained: Sequence[str], repository: Path, kind: str, workers: str
) -> None:
    long = "thequickbrownfoxjumpsoverthelazydog" * 6  # a few long words, as the library takes its time for each word
    unit = f"the {long}, jumped over 12{long} and the like. "
    text = unit * (50_000_000 // len(unit)) if kind == "document of 50 MB" else "over" * 250_000
    lines = [json.dumps({"text": line}) for line in ("the fox", text, "the dog")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x"), "--workers", workers]
    code, own, largest_worker = measured(tmp_path, repository, [*words, *trained])
    assert code == 0
    assert own < 2**30
    assert largest_worker < 2**30
    tokenizer = preprocess_data.build_tokenizer(
        preprocess_data.TokenizerConfig(vocab_file=trained[1], merge_file=trained[3])
    )
    first, huge, last = (ids for (ids,) in documents(tmp_path / "x_text_document"))
    assert (first, last) == (tokenizer.tokenize("the fox"), tokenizer.tokenize("the dog"))
    if kind == "document of 50 MB":
        begin = tokenizer.tokenize(unit)[:-1]  # the last blank belongs to the next "the"
        again = tokenizer.tokenize(unit + unit)[len(begin) : -1]
        assert huge[: len(begin)] == begin
        assert huge[len(begin) : -1] == again * (50_000_000 // len(unit) - 1)
    else:
        assert huge == tokenizer.tokenize(text)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--workers", "2"], ["--workers", "2", "--partitions", "4"]])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, repository: Path, more: list[str]) -> None:
    held = []
    for copies in (1, 8):
        line = json.dumps({"text": "1 2 3 4 5 6 7 8 9 10 " * 40}) + "\n"
        (tmp_path / "in.jsonl").write_text(line * 2500 * copies)  # 2 MB, 17 MB
        words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x"), *NULL, *more]
        code, *both = measured(tmp_path, repository, words)
        assert code == 0
        held.append(both)
    assert held[1][0] - held[0][0] < 12e6  # with the pages of a part that is mapped; of all parts they are 14 MB more
    assert held[1][1] - held[0][1] < 8e6


@pytest.mark.parametrize("more", [[], ["--partitions", "40"]])
@pytest.mark.parametrize("old", [False, True])
def test_a_kill_leaves_no_half_set(tmp_path: Path, repository: Path, more: list[str], old: bool) -> None:
    line = json.dumps({"text": "1 2 3 4 5 6 7 8 9 10 " * 40}) + "\n"
    (tmp_path / "old.jsonl").write_text(GOOD)
    if old:
        assert run(tmp_path, [tmp_path / "old.jsonl"]) == 0
    (tmp_path / "in.jsonl").write_text(line * 60_000)
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x"), *NULL, *more]
    command = [sys.executable, str(repository / "tools/preprocess_data.py"), *words, "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        deadline = time.monotonic() + 180
        while not half_written(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert half_written(tmp_path), "the kill comes too late to mean anything"
        process.send_signal(signal.SIGKILL)
    if old:
        assert documents(tmp_path / "x_text_document") == [[[1, 2]]]
    else:
        assert not (tmp_path / "x_text_document.bin").exists()
        with pytest.raises(ValueError, match="is missing"):
            IndexedDataset(tmp_path / "x_text_document")


@pytest.mark.parametrize("more", [["--workers", "1"], ["--workers", "2"], ["--workers", "2", "--partitions", "4"]])
def test_a_request_to_end_leaves_nothing(tmp_path: Path, repository: Path, more: list[str]) -> None:
    line = json.dumps({"text": "1 2 3 4 5 6 7 8 9 10 " * 40}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 60_000)
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "new" / "x"), *NULL, *more]
    command = [sys.executable, str(repository / "tools/preprocess_data.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 180
        while not any(size_of(path) for path in tmp_path.glob("new/**/*.bin.*.tmp")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        told = process.communicate()[1]
    assert process.returncode == 143
    assert told.endswith("error: interrupted; nothing was written\n")
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("full", ["text", "title"])
def test_the_sets_of_two_keys_appear_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1", "title": "2"}\n')
    flush = os.fsync

    def without_room(descriptor: int) -> None:
        flush(descriptor)
        if f".x_{full}_document.bin" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", without_room)
    assert run(tmp_path, [tmp_path / "in.jsonl"], "--json-keys", "text", "title") == 2
    name = tmp_path / f"x_{full}_document.bin"
    assert f"error: {name}: No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("delay", [0.02, 0.04, 0.07, 0.1])
def test_an_interrupt_while_workers_start_is_told_in_one_sentence(
    tmp_path: Path, repository: Path, delay: float
) -> None:
    (tmp_path / "in.jsonl").write_text((GOOD + "\n") * 100_000)
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x"), *NULL, "--partitions", "4"]
    command = [sys.executable, str(repository / "tools/preprocess_data.py"), *words, "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 180
        while not workers_of(process.pid):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)  # as the keyboard does
        told = process.communicate()[1]
    assert process.returncode == 130
    assert told.endswith("error: interrupted; nothing was written\n")
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def workers_of(pid: int) -> list[str]:
    """The worker processes that `pid` has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [child for child in children if b"spawn_main" in command_line(child)]


def command_line(pid: str) -> bytes:
    """That of a process, nothing where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Sleeper:
    """A tokenizer that hangs on a text; it says so in a file."""

    vocab_size, eod = 1000, 999

    def __init__(self, note: Path) -> None:
        self.note = note

    def tokenize(self, text: str) -> list[int]:
        if text == "wait for it":
            self.note.touch()
            time.sleep(300)
        elif text == "refuse":
            while not self.note.exists():
                time.sleep(0.01)
            raise ValueError("refused")
        return [1]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]


@pytest.mark.parametrize("why", ["bad record", "interrupt"])
def test_partitions_that_run_are_not_waited_for_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], why: str
) -> None:
    note = tmp_path / "note"
    monkeypatch.setattr(preprocess_data, "build_tokenizer", lambda config: Sleeper(note))
    texts = ["wait for it", "refuse" if why == "bad record" else "fine text"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    began = time.monotonic()
    if why == "interrupt":
        threading.Thread(target=interrupt_after, args=(note,)).start()
    more = ["--on-bad-record", "fail", "--partitions", "2", "--workers", "2"]
    assert run(tmp_path, [tmp_path / "in.jsonl"], *more) == (2 if why == "bad record" else 130)
    assert time.monotonic() - began < 200
    told = capfd.readouterr().err
    assert ("in.jsonl:2: not understood" if why == "bad record" else "error: interrupted") in told
    assert "Traceback" not in told
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "note"}


def interrupt_after(note: Path) -> None:
    """Send this process what Ctrl-C sends, once `note` exists."""
    deadline = time.monotonic() + 120
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def half_written(folder: Path) -> bool:
    """Whether tokens stand under a temporary name."""
    return any(size_of(path) > 100_000 for path in folder.glob(".x_text_document.bin.*.tmp"))


def size_of(path: Path) -> int:
    """The bytes of a file, none where it has got another name meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
