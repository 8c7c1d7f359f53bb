"""The files of MNLI and QQP become pairs with a class, and what is wrong in them is named by its line."""

from pathlib import Path

import numpy as np
import pytest
import transformers

from megatron.base.complaints import ConfigError
from megatron.tasks.examples import ExampleSet, pair_ids
from megatron.tasks.glue import LAYOUTS, glue_examples, read_lines
from megatron.tasks.task import Files
from megatron.tokenizer.fast import bert_word_piece_tokenizer
from tests.harness.race_files import WORDS, write_tsv, write_vocabulary

# The columns of MNLI's train.tsv; those of its development files have four more labels.
MNLI = (
    *("index", "promptID", "pairID", "genre"),
    *("sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"),
    *("sentence1", "sentence2", "label1", "gold_label"),
)
QQP = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")


def mnli(index: int, a: str, b: str, label: str, labels: int = 1) -> list[str]:
    return [str(index), *["x"] * 7, a, b, *["neutral"] * labels, label]


def test_mnli_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    rows = [mnli(0, "w1", "w2", "neutral"), mnli(1, 'w1 " w3', "w2\x85\u2028", "entailment")]
    train = write_tsv(tmp_path / "train.tsv", MNLI, rows)
    names = [*MNLI[:-2], "label1", "label2", "label3", "label4", "label5", "gold_label"]
    dev = write_tsv(tmp_path / "dev_matched.tsv", names, [mnli(5, "w4", "w5", "contradiction", 5)])
    lines = read_lines(Files([str(train), str(dev)], "--train-data"), LAYOUTS["MNLI"])
    assert [tuple(line) for line in lines] == [
        ("train", "0", "w1", "w2", 2),
        ("train", "1", 'w1 " w3', "w2\x85\u2028", 1),
        ("dev_matched", "5", "w4", "w5", 0),
    ]


def test_qqp_with_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_bytes(b"\t".join(n.encode() for n in QQP) + b"\r\n7\t1\t2\tw1\tw2\t1\r\n\r\n")
    assert [tuple(line) for line in read_lines(Files([str(path)], "--valid-data"), LAYOUTS["QQP"])] == [
        ("dev", "7", "w1", "w2", 1)
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["7", "1", "2", "w1", "w2", "1"], ["8", "1", "2", "w1"]], "line 3: it has 4 columns, and the first line"),
        ([["7", "1", "2", "w1", "w2", "1", ""]], "line 2: it has 7 columns"),
        ([["7", "1", "2", "w1", "w2", "yes"]], "line 2: is_duplicate is 'yes': it must be one of 0, 1"),
        ([], "there are no lines in it"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, rows: list[list[str]], words: str) -> None:
    path = write_tsv(tmp_path / "train.tsv", QQP, rows)
    with pytest.raises(ConfigError) as caught:
        read_lines(Files([str(path)], "--train-data"), LAYOUTS["QQP"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"--train-data {path}") and words in problem


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    test = write_tsv(tmp_path / "test.tsv", ("id", "question1", "question2"), [["1", "w1", "w2"]])
    binary = tmp_path / "train.tsv"
    binary.write_bytes(b"\t".join(name.encode() for name in QQP) + b"\r\n1\t\xff\n")
    with pytest.raises(ConfigError) as caught:
        read_lines(Files([str(test), str(binary), str(tmp_path / "absent.tsv")], "--valid-data"), LAYOUTS["QQP"])
    first, second, third = caught.value.problems
    assert "line 1: it must name the columns, and lacks is_duplicate" in first
    assert f"{binary}, line 2: it is not UTF-8 (invalid start byte at its byte 2)" in second
    assert "absent.tsv: it cannot be read: No such file" in third


def test_malformed_lines_can_be_left_out(tmp_path: Path) -> None:
    rows = [["7", "1", "2", "w1", "w2", "1"], ["8", "1"], ["9", "1", "2", "w3", "w4", "0"]]
    path = write_tsv(tmp_path / "train.tsv", QQP, rows)
    told: list[str] = []
    lines = read_lines(Files([str(path)], "--train-data", told.append), LAYOUTS["QQP"])
    assert [line.key for line in lines] == ["7", "9"]
    assert told == [f"{path}: 1 malformed line left out, the first is line 3"]


@pytest.mark.parametrize("length", [9, 32])
def test_samples_are_those_of_transformers(tmp_path: Path, length: int) -> None:
    vocabulary = str(write_vocabulary(tmp_path))
    theirs = transformers.BertTokenizerFast(vocabulary, do_lower_case=True)
    tokenizer = bert_word_piece_tokenizer(vocabulary, lower_case=True)
    sizes = [(1, 9), (9, 1), (4, 5), (3, 2), (2, 3), (7, 6), (1, 1)]
    rows = [[str(i), "1", "2", " ".join(WORDS[:a]), " ".join(WORDS[9 : 9 + b]), "1"] for i, (a, b) in enumerate(sizes)]
    path = write_tsv(tmp_path / "dev.tsv", QQP, rows)
    examples = glue_examples(read_lines(Files([str(path)], "--valid-data"), LAYOUTS["QQP"]), tokenizer, length)
    samples = ExampleSet(examples, length, pair_ids(tokenizer))
    expected = theirs(
        [row[3] for row in rows],
        [row[4] for row in rows],
        truncation="longest_first",
        max_length=length,
        padding="max_length",
        return_tensors="np",
    )
    names = {"tokens": "input_ids", "types": "token_type_ids", "padding_mask": "attention_mask"}
    for i in range(len(rows)):
        for mine, name in names.items():
            np.testing.assert_array_equal(samples[i][mine], expected[name][i])
