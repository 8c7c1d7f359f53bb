"""RACE folders are read as they are, turned into BERT's samples, and told apart from what is none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatron.base.complaints import ConfigError
from megatron.tasks.examples import ExampleSet, pair_ids
from megatron.tasks.race import race_examples, read_article, read_articles, with_option
from megatron.tasks.task import Files
from megatron.tokenizer.fast import bert_word_piece_tokenizer
from tests.harness.race_files import write_race, write_vocabulary

GOOD: dict[str, Any] = {
    "article": "w1 w2",
    "questions": ["is _ ?", "the answer"],
    "options": [["w1", "w3", "w4", "w5"], ["w6", "w7", "w8", "w2"]],
    "answers": ["A", "D"],
    "id": "high1.txt",
}


def put(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("question", "option", "whole"),
    [
        ("the _ is", "w1", "the w1 is"),
        ("_ and _", "w1", "w1 and w1"),
        ("the ____ is", r"\1", r"the \1 is"),
        ("what is it?", "w1", "what is it? w1"),
    ],
)
def test_a_blank_is_filled_and_without_one_the_option_stands_behind(question: str, option: str, whole: str) -> None:
    assert with_option(question, option) == whole


def test_stray_files_are_left_alone(tmp_path: Path) -> None:
    for group in ("middle", "high"):
        put(tmp_path / "dev" / group / "7.txt", GOOD)
        for stray in (".7.txt", "._7.txt", ".DS_Store", "7.txt.bak", "README", "notes.json"):
            put(tmp_path / "dev" / group / stray, "not json")
        (tmp_path / "dev" / group / "folder.txt").mkdir()
    for stray in (tmp_path / "dev" / "other" / "8.txt", tmp_path / "dev" / "notes.txt"):
        put(stray, "not json")
    whole = read_articles(Files([str(tmp_path / "dev")], "--valid-data"))
    assert [(a.name, a.group) for a in whole] == [("middle/7", "middle"), ("high/7", "high")]
    single = read_articles(Files([str(tmp_path / "dev" / "high"), str(tmp_path / "dev" / "middle")], "--valid-data"))
    assert sorted(single, key=lambda a: a.name, reverse=True) == whole
    assert whole[0].answers == (0, 3)


@pytest.mark.parametrize(("at", "path"), [("high", "."), ("high/in", ".."), ("high", "../high/"), (".", "./high/.")])
def test_names_are_those_of_the_folder_however_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, path: str
) -> None:
    put(tmp_path / "high" / "7.txt", GOOD)
    (tmp_path / "high" / "in").mkdir()
    monkeypatch.chdir(tmp_path / at)
    (article,) = read_articles(Files([path], "--valid-data"))
    assert (article.name, article.group) == ("high/7", "high")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"article": None}, "the field 'article' is missing"),
        ({"options": None}, "the field 'options' is missing"),
        ({"article": ["w1"]}, "'article' must be a text, and is a list"),
        ({"answers": "AD"}, "'answers' must be a list, and is a str"),
        ({"answers": ["A"]}, "its counts differ: 2 questions, 2 options, 1 answers"),
        ({"answers": ["A", "E"]}, "the answer to question 2 is 'E': it must be one of A, B, C, D"),
        ({"answers": ["AB", "D"]}, "the answer to question 1 is 'AB'"),
        ({"answers": [0, 3]}, "the answer to question 1 is 0"),
        ({"questions": ["is", 3]}, "question 2 must be a text, and is a int"),
        ({"options": [["w1", "w2", "w3"], GOOD["options"][1]]}, "question 1 must have 4 options"),
        ({"article": "w1 \ud800"}, "it holds the half character '\\ud800', which is no text"),
        ({"options": [["w1", "w2", "w3", "\udfff"], GOOD["options"][1]]}, "it holds the half character"),
        ({"options": [[1, 2, 3, 4], GOOD["options"][1]]}, "question 1 must have 4 options"),
    ],
)
def test_an_object_that_is_no_article_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = put(tmp_path / "1.txt", {name: v for name, v in (GOOD | change).items() if v is not None})
    with pytest.raises(ValueError, match="1.txt") as caught:
        read_article(path)
    assert str(caught.value).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"article":\n "w1",\n oops}', "1.txt, line 3, column 2: it is not JSON"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "1.txt, line 2, column 1: it is not JSON"),
        ("", "1.txt, line 1, column 1: it is not JSON"),
        ("1" * 5000, "1.txt: it cannot be read: Exceeds the limit"),
        ("[1]", "1.txt: it must hold a JSON object, and holds a list"),
    ],
)
def test_what_is_not_json_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ValueError, match="1.txt") as caught:
        read_article(put(tmp_path / "1.txt", content))
    assert words in str(caught.value)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.txt", "no")
    put(tmp_path / "a" / "2.txt", GOOD)
    (tmp_path / "a" / "3.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        read_articles(Files([str(tmp_path / "a")], "--train-data"))
    assert len(caught.value.problems) == 2
    assert "3.txt: it cannot be read" in caught.value.problems[1]


@pytest.mark.parametrize("name", ["empty", "absent", "file"])
def test_a_folder_without_questions_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty" / "high").mkdir(parents=True)
    put(tmp_path / "file", GOOD)
    put(tmp_path / "empty" / "1.txt", {**GOOD, "questions": [], "options": [], "answers": []})
    with pytest.raises(ConfigError, match=f"--train-data .*{name}: there are no questions in it"):
        read_articles(Files([str(tmp_path / name)], "--train-data"))


@pytest.mark.parametrize("length", [12, 64])
def test_samples_are_those_of_transformers(tmp_path: Path, length: int) -> None:
    """Ids, types and mask of every option, an article that is too long losing its end."""
    vocabulary = str(write_vocabulary(tmp_path))
    theirs = transformers.BertTokenizerFast(vocabulary, do_lower_case=True)
    tokenizer = bert_word_piece_tokenizer(vocabulary, lower_case=True)
    articles = read_articles(Files([str(write_race(tmp_path / "train", {"middle": 3, "high": 2}))], "--train-data"))
    samples = ExampleSet(race_examples(articles, tokenizer), length, pair_ids(tokenizer))
    questions = [
        (a.text, question, options, answer)
        for a in articles
        for question, options, answer in zip(a.questions, a.options, a.answers, strict=True)
    ]
    assert len(samples) == len(questions) == 10
    for i, (text, question, options, answer) in enumerate(questions):
        asked = [question.replace("_", o) if "_" in question else f"{question} {o}" for o in options]
        expected = theirs(
            [text] * 4, asked, truncation="only_first", max_length=length, padding="max_length", return_tensors="np"
        )
        names = {"tokens": "input_ids", "types": "token_type_ids", "padding_mask": "attention_mask"}
        for mine, name in names.items():
            np.testing.assert_array_equal(samples[i][mine], expected[name])
        assert samples[i]["label"] == answer
    assert samples.examples[9].name == "high/1#1"
    cut = [s["padding_mask"].all(axis=1) for s in map(samples.__getitem__, range(10))]
    assert np.all(cut) == (length == 12)


def test_a_question_that_has_no_room_is_refused(tmp_path: Path) -> None:
    tokenizer = bert_word_piece_tokenizer(str(write_vocabulary(tmp_path)), lower_case=True)
    put(tmp_path / "dev" / "high" / "1.txt", GOOD | {"questions": ["is", "the answer is the answer"]})
    examples = race_examples(read_articles(Files([str(tmp_path / "dev")], "--train-data")), tokenizer)
    with pytest.raises(ValueError, match=r"--seq-length 8: high/1#1 needs at least 9, for a question"):
        ExampleSet(examples, 8, pair_ids(tokenizer))
    sample = ExampleSet(examples, 9, pair_ids(tokenizer))[1]
    assert sample["tokens"][0].tolist()[:2] == [tokenizer.cls, tokenizer.sep]
