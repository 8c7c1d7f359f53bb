"""Speed of the data path, as ratios to what it should reach: `python tools/benchmark_data.py [--folder F]`.

Preprocessing is compared with bare batch encoding by the library `tokenizers`: the same texts, vocabulary and cores,
taken in turns in one run, medians. The text is Debian's dict-gcide where that is installed, else the sources of
Python's standard library. Meant for a quiet machine: the ratio of processor seconds is told beside that of seconds.
"""

import contextlib
import dataclasses
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, flag, minimum_problems
from megatron.data.benchmark import measure_fetching, measure_indices
from megatron.data.indexed import IndexedDataset
from megatron.training.arguments import parse_composed
from megatron.training.failure import exit_code

TOOLS = Path(__file__).resolve().parent
DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
DOCUMENT = 4_000  # characters, about
_RATIO, _BUILD_SECONDS, _PEAK_GIB, _OPEN_SECONDS, _TOKENS_A_SECOND = 0.8, 10.0, 2.0, 0.2, 300_000.0

# Loads the texts and the tokenizer, then encodes them all when it is told to, again and again.
BARE = """
import json, os, sys, time
from tokenizers import Tokenizer, models, pre_tokenizers
corpus, vocab, merges = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(corpus, encoding="utf-8")]
tokenizer = Tokenizer(models.BPE.from_file(vocab, merges))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
encode = {"encode_batch": tokenizer.encode_batch, "encode_batch_fast": tokenizer.encode_batch_fast}
for line in sys.stdin:
    began, used = time.perf_counter(), sum(os.times()[:2])
    encodings = encode[line.strip()](texts, add_special_tokens=False)
    seconds, used = time.perf_counter() - began, sum(os.times()[:2]) - used
    print(seconds, used, sum(map(len, encodings)), flush=True)
    del encodings
"""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(Config):
    """What is measured."""

    folder: str | None = flag(None, "where files are written, by default a temporary folder")
    vocab_file: str | None = flag(None, "vocab.json of GPT-2's kind; by default one is learned from the text")
    merge_file: str | None = flag(None, "merges.txt that belongs to it")
    vocab_size: int = flag(32_768, "ids of the tokenizer that is learned")
    megabytes: int = flag(40, "text to be tokenised")
    rounds: int = flag(3, "measurements of each kind, of which the median counts")
    workers: int = flag(2, "cores: worker processes of preprocessing, threads of bare encoding")
    index_documents: int = flag(10_000_000, "documents of the set whose indices are made; 0 leaves it out")
    fetched_documents: int = flag(120_000, "documents of random tokens, about 1 KB each, that samples are fetched from")
    fetched_samples: int = flag(20_000, "samples that are fetched")
    seq_length: int = flag(1024, "tokens of a sample")

    def problems(self) -> list[str]:
        found = minimum_problems(
            self, 1, "megabytes", "rounds", "workers", "fetched_documents", "fetched_samples", "seq_length"
        ) + minimum_problems(self, 0, "index_documents")
        if (self.vocab_file is None) != (self.merge_file is None):
            found.append("--vocab-file and --merge-file belong together: give both or none")
        return found


@dataclasses.dataclass(frozen=True)
class BenchmarkRun(ComposedConfig):
    """Measure the speed of the data path."""

    benchmark: BenchmarkConfig


class Timed(NamedTuple):
    """Seconds on the clock, and of all processors."""

    seconds: float
    processor: float


def source_text() -> tuple[str, str]:
    """What the text is, and the text."""
    if DICTIONARY.is_file():
        return "dict-gcide", gzip.decompress(DICTIONARY.read_bytes()).decode("utf-8", "replace")
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    own = [path for path in files if "site-packages" not in path.parts]
    return "the Python standard library", "\n\n".join(path.read_text("utf-8", "replace") for path in own)


def write_corpus(path: Path, megabytes: int) -> str:
    """Documents of whole paragraphs as JSONL, the text repeated where it is too short; returns what it is."""
    name, text = source_text()
    limit, written = megabytes * 1_000_000, 0
    paragraphs = text.split("\n\n")
    with open(path, "w", encoding="utf-8") as stream:
        while written < limit:
            for document in grouped(paragraphs):
                stream.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
                written += len(document.encode())
                if written >= limit:
                    break
    return f"{written / 1e6:.1f} MB of {name}"


def grouped(paragraphs: Sequence[str]) -> Iterator[str]:
    """Paragraphs put together to documents of at least `DOCUMENT` characters."""
    group: list[str] = []
    for paragraph in paragraphs:
        group.append(paragraph)
        if sum(map(len, group)) >= DOCUMENT:
            yield "\n\n".join(group)
            group = []
    if any(group):
        yield "\n\n".join(group)


def learn_tokenizer(corpus: Path, folder: Path, vocab_size: int) -> tuple[str, str]:
    """The files of a tokenizer learned from the corpus."""
    words = ["--input", str(corpus), "--output-dir", str(folder), "--vocab-size", str(vocab_size)]
    subprocess.run([sys.executable, str(TOOLS / "train_tokenizer.py"), *words], check=True, capture_output=True)
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def time_preprocessing(corpus: Path, prefix: Path, vocab: str, merges: str, workers: int) -> Timed:
    """The whole tool, from its start to the files in place."""
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", str(workers)]
    words += ["--vocab-file", vocab, "--merge-file", merges, "--tokenizer-type", "GPT2BPETokenizer"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, str(TOOLS / "preprocess_data.py"), *words], check=True, capture_output=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Timed(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@contextlib.contextmanager
def bare_encoder(corpus: Path, vocab: str, merges: str, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has the texts in memory and waits to be told to encode them."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", BARE, str(corpus), vocab, merges]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def time_bare(process: subprocess.Popen[str], method: str) -> tuple[Timed, int]:
    """How long the library takes for all texts at once, and how many tokens it finds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(method + "\n")
    process.stdin.flush()
    seconds, processor, tokens = process.stdout.readline().split()
    return Timed(float(seconds), float(processor)), int(tokens)


def compare_preprocessing(config: BenchmarkConfig, folder: Path) -> list[str]:
    """Lines that tell how the making of a token set compares with bare encoding."""
    corpus, prefix = folder / "benchmark.jsonl", folder / "benchmark"
    name = write_corpus(corpus, config.megabytes)
    if config.vocab_file is None or config.merge_file is None:
        vocab, merges = learn_tokenizer(corpus, folder, config.vocab_size)
    else:
        vocab, merges = config.vocab_file, config.merge_file
    runs: dict[str, list[Timed]] = {"tool": [], "encode_batch": [], "encode_batch_fast": []}
    with bare_encoder(corpus, vocab, merges, config.workers) as process:
        for _ in range(config.rounds):
            runs["tool"].append(time_preprocessing(corpus, prefix, vocab, merges, config.workers))
            for method in ("encode_batch", "encode_batch_fast"):
                timed, tokens = time_bare(process, method)
                runs[method].append(timed)
    written = IndexedDataset(f"{prefix}_text_document")
    assert int(written.sizes.sum(dtype=np.int64)) == tokens, "the tool and the library find other numbers of tokens"
    return preprocessing_lines(name, tokens, config.workers, runs)


def preprocessing_lines(name: str, tokens: int, workers: int, runs: dict[str, list[Timed]]) -> list[str]:
    """The medians, and ratios of them."""
    medians = {
        kind: Timed(statistics.median(t.seconds for t in times), statistics.median(t.processor for t in times))
        for kind, times in runs.items()
    }
    lines = [f"preprocessing {name}, {tokens:,} tokens, {workers} workers, median of {len(runs['tool'])}:"]
    for kind, label in (("tool", "tools/preprocess_data.py, its start included"), *((m, m) for m in list(runs)[1:])):
        seconds, processor = medians[kind]
        lines.append(f"  {label}: {seconds:.2f} s, {processor:.2f} processor s, {tokens / seconds:,.0f} tokens/s")
    for kind in list(runs)[1:]:
        ratio = medians[kind].seconds / medians["tool"].seconds
        used = medians[kind].processor / medians["tool"].processor
        lines.append(told(f"throughput / {kind}", ratio, _RATIO) + f" (by processor seconds {used:.2f})")
    return lines


def told(what: str, value: float, goal: float, at_most: bool = False) -> str:
    """A figure beside its goal, and their ratio, which is above 1 where the goal is reached."""
    ratio = goal / value if at_most else value / goal
    return f"{what}: {value:,.3g}, goal {'at most' if at_most else 'at least'} {goal:,g}: {ratio:.2f} of it"


def index_lines(config: BenchmarkConfig, folder: Path) -> list[str]:
    """Time and memory of making indices, time of opening a set that has them."""
    figures = measure_indices(folder, config.index_documents, seq_length=config.seq_length)
    return [
        f"indices of {config.index_documents:,} documents, {figures.epochs} epochs, {figures.samples:,} samples:",
        "  " + told("seconds to make them", figures.build_seconds, _BUILD_SECONDS, at_most=True),
        "  " + told("GiB held at most", figures.peak_gib, _PEAK_GIB, at_most=True),
        "  " + told("seconds to open the set and its indices again", figures.open_seconds, _OPEN_SECONDS, at_most=True),
    ]


def fetching_lines(config: BenchmarkConfig, folder: Path) -> list[str]:
    """Tokens a second of one process."""
    rate = measure_fetching(folder, config.fetched_documents, config.fetched_samples, config.seq_length)
    return [told(f"fetching samples of {config.seq_length} tokens, tokens/s of a process", rate, _TOKENS_A_SECOND)]


def benchmark(config: BenchmarkConfig) -> None:
    """Measure all and print it."""
    with tempfile.TemporaryDirectory(dir=config.folder) as name:
        folder = Path(name)
        print(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        print(*compare_preprocessing(config, folder), sep="\n", flush=True)
        print(*fetching_lines(config, folder), sep="\n", flush=True)
        if config.index_documents:
            print(*index_lines(config, folder), sep="\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for the user's mistakes."""
    return exit_code(
        lambda: benchmark(parse_composed(BenchmarkRun, argv, world_size=1, prog="benchmark_data.py").benchmark)
    )


if __name__ == "__main__":
    sys.exit(main())
