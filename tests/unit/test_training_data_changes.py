"""What decides the samples of a run, and what is said where that is not what it was at the checkpoint."""

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import BlendedDataset, GPTDataset, IndexedDataset
from megatron.data.identity import SetPart
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.data_changes import data_changes
from megatron.training.data_facts import DataFacts
from tests.harness.runs import flags, write_documents
from tests.harness.token_files import write_token_files

PART = SetPart("text", 100, 5000, 1, 0, 80, 1.0, 2, False)
FACTS = DataFacts(16, 1234, 8, [], 160, [0.8, 0.2, 0.0], {"--data-path": [[1.0, "text"]]}, sets={"train": [PART]})


def said(**changes: Any) -> tuple[list[str], list[str]]:
    """What is to be accepted and what is told where `changes` are made to the facts, after 40 samples."""
    changed = data_changes(FACTS, dataclasses.replace(FACTS, **changes), 40)
    return changed.to_accept, changed.to_tell


def parts(**changes: Any) -> dict[str, list[SetPart]]:
    return {"train": [dataclasses.replace(PART, **changes)]}


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_equal_identities_mean_equal_samples(sizes: list[int], s: int, asked: int, now_asked: int) -> None:
    """However many samples are asked for."""
    if sum(sizes) <= s:
        return
    with tempfile.TemporaryDirectory() as folder:
        tokens = iter(range(1, 100))
        documents = [[[next(tokens) for _ in range(size)]] for size in sizes]
        indexed = IndexedDataset(write_token_files(Path(folder) / "set", documents, 8))
        one, other = (GPTDataset(indexed, range(len(sizes)), n, s, seed=3) for n in (asked, now_asked))
        if one.identity() == other.identity():
            for i in range(min(asked, now_asked)):
                np.testing.assert_array_equal(one[i]["tokens"], other[i]["tokens"])
        assert one.identity()[0].epochs == one.indices.epochs
        (Path(folder) / "elsewhere").mkdir()
        moved = IndexedDataset(write_token_files(Path(folder) / "elsewhere" / "set", documents, 8))
        assert GPTDataset(moved, range(len(sizes)), asked, s, seed=3).identity() == one.identity()


def test_what_a_blend_has_given_and_will_give(tmp_path: Path) -> None:
    """The numbers in the words are those of the draws, within the sample that a set may be ahead or two behind."""
    sets = [IndexedDataset(write_documents(tmp_path / name, 40)) for name in ("one", "two")]

    def blend(shares: list[float]) -> BlendedDataset:
        members = [GPTDataset(indexed, range(40), 300, 8, seed=1) for indexed in sets]
        return BlendedDataset(members, ["one", "two"], shares, 200, indexed=sets[0])

    before, now = blend([0.5, 0.5]), blend([0.8, 0.2])
    facts = [DataFacts(sets={"train": dataset.identity()}) for dataset in (before, now)]
    told = data_changes(*facts, 100).to_accept
    assert [sentence.split()[0] for sentence in told] == ["one", "two"]
    for number, (sentence, outcome) in enumerate(zip(told, ("left out", "come again"), strict=True)):
        match = re.search(
            r"about (\d+) of its samples are seen, and it goes on at about its sample (\d+), so that (\d+)", sentence
        )
        assert match is not None and sentence.endswith(outcome)
        for said_of, dataset in zip(match.groups(), (before, now), strict=False):
            assert abs(int(said_of) - int((dataset.set_numbers[:100] == number).sum())) <= 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seq_length": 32}, "--seq-length is 32 and was 16, so samples are cut anew: it goes on at sample 40"),
        ({"seed": 1}, "--seed is 1 and was 1234, so samples are shuffled anew: it goes on at sample 40"),
        (
            {"global_batch_size": 4},
            "the batches are --global-batch-size 4 and were --global-batch-size 8: the next one",
        ),
        (
            {"rampup_batch_size": [4, 2, 99]},
            "the batches are --global-batch-size 8 with --rampup-batch-size 4 2 99 and were --global-batch-size 8: ",
        ),
        ({"sets": parts(checksum=2, name="new")}, "the training set is new (100 documents, 5,000 tokens), 0 to 79 and"),
        (
            {"sets": parts(end=90)},
            "--split: of text the documents 0 to 89 are trained on, and 0 to 79 were: it goes on",
        ),
    ],
)
def test_a_change_to_accept(changes: dict[str, Any], sentence: str) -> None:
    to_accept, to_tell = said(**changes)
    assert len(to_accept) == 1 and to_accept[0].startswith(sentence)
    assert to_tell == []
    assert data_changes(FACTS, dataclasses.replace(FACTS, **changes), 0).to_accept == []  # nothing is seen yet


def test_what_changes_nothing_is_not_told() -> None:
    assert said() == said(sets=parts(name="renamed")) == ([], [])
    # Where the sets are known, what the flags call them and the split that gives the same documents do not matter.
    assert said(names={"--train-data-path": [[1.0, "x"]]}, split=[0.81, 0.19, 0.0]) == ([], [])


def test_a_longer_training_is_told() -> None:
    to_accept, (told,) = said(train_samples=320)
    assert to_accept == [] and told.endswith("is asked for 320 samples and was for 160, in the same order")
    to_accept, (told,) = said(train_samples=320, sets=parts(epochs=3, last_apart=True))
    assert to_accept == []
    assert "text is shuffled over 3 passes and was over 2, the last by itself: it goes on at sample 40" in told


def test_another_validation_set_is_to_be_accepted() -> None:
    now = dataclasses.replace(PART, begin=80, end=100)
    before = dataclasses.replace(FACTS, sets={"train": [PART], "valid": [now]})
    more = dataclasses.replace(FACTS, sets={"train": [PART], "valid": [dataclasses.replace(now, epochs=9)]})
    other = dataclasses.replace(FACTS, sets={"train": [PART], "valid": [dataclasses.replace(now, begin=90)]})
    assert data_changes(before, more, 40).to_accept == []
    (told,) = data_changes(before, other, 40).to_accept
    assert told.startswith("the valid set is text (100 documents, 5,000 tokens), 90 to 99 and was ")
    assert data_changes(before, FACTS, 40).to_accept == []  # none is asked for


def test_flags_count_where_the_sets_do_not_tell() -> None:
    before = dataclasses.replace(FACTS, sets={})
    for changes, sentence in (
        ({"names": {"--data-path": [[1.0, "other"]]}}, "the token sets are --data-path 1 other and were --data-path 1"),
        ({"split": [1.0, 0.0, 0.0]}, "--split is [1.0, 0.0, 0.0] and was [0.8, 0.2, 0.0], as parts: it goes on"),
    ):
        (told,) = data_changes(before, dataclasses.replace(before, **changes), 40).to_accept
        assert told.startswith(sentence)
    assert data_changes(before, dataclasses.replace(before, train_samples=9), 40).to_tell[0].endswith("set can tell")


def test_facts_out_of_a_checkpoint() -> None:
    """They come back as they were saved; what only has flags tells what they tell, in whatever folder its data was."""
    saved = json.loads(json.dumps({"data": dataclasses.asdict(FACTS)}))
    assert DataFacts.of_checkpoint(saved) == FACTS
    ramp = ["--rampup-batch-size", "4", "2", "16"]
    here, there = (
        parse_composed(RunConfig, [*flags(path), *ramp], world_size=1, check_inputs=False)
        for path in ("here/text", "there/text")
    )
    now = DataFacts.of_run(here, 1, 160, (None, None, None))
    moved = {"config": dataclasses.asdict(there)}
    before = DataFacts.of_checkpoint(json.loads(json.dumps(moved)))
    assert before == dataclasses.replace(now, train_samples=None)
    assert data_changes(DataFacts.of_checkpoint({}), FACTS, 40) == data_changes(FACTS, FACTS, 40)
