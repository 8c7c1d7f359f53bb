"""benchmark_data.py runs at toy size and prints every ratio."""

import re

import pytest

from tools import benchmark_data

TOY = ["--megabytes", "1", "--rounds", "1", "--workers", "2", "--vocab-size", "400"]
TOY += ["--index-documents", "5000", "--fetched-documents", "100", "--fetched-samples", "20"]


@pytest.mark.slow
def test_all_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_data.main(TOY) == 0
    told = capsys.readouterr().out
    for what in (
        r"throughput / encode_batch: [\d.]+, goal at least 0.8: [\d.]+ of it \(by processor seconds [\d.]+\)",
        r"throughput / encode_batch_fast: [\d.]+, goal at least 0.8",
        r"fetching samples of 1024 tokens, tokens/s of a process: [\d.,e+]+, goal at least 300,000",
        r"indices of 5,000 documents, 3 epochs",
        r"seconds to make them: [\d.]+, goal at most 10",
        r"GiB held at most: [\d.]+, goal at most 2",
        r"seconds to open the set and its indices again: [\d.e-]+, goal at most 0.2",
    ):
        assert re.search(what, told), what


def test_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_data.main(["--rounds", "0", "--vocab-file", "x"]) == 2
    told = capsys.readouterr().err
    assert "--rounds 0: it must be at least 1" in told
    assert "--vocab-file and --merge-file belong together" in told
