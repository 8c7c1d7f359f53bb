"""What a checkpoint answers to programs of evaluation is what Hugging Face's library says; the evaluation harness."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.tasks.answers import Answers, Wish
from megatron.tasks.harness import main, wish_of
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.trained import TrainedRequest, opened, parse_request
from megatron.tasks.zero_shot import ZeroShotRequest
from tests.harness.ranks import Ranks
from tests.harness.runs import complaints
from tests.harness.zero_shot import LENGTH, Reference
from tools import convert_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def reference(folder: Path, shared: Path) -> Reference:
    return Reference(folder / "hf", shared, learned=False)


@pytest.fixture(scope="module")
def load(folder: Path, reference: Reference) -> str:
    asked = ["--from", "hf", "--to", "native", "--load", str(folder / "hf"), "--save", str(folder / "ours")]
    assert convert_checkpoint.main(asked) == 0
    return str(folder / "ours")


class DataParallel(TrainedRequest):
    data_parallel = ZeroShotRequest.data_parallel


def answered(rank: int, world_size: int, load: str, layout: list[str], name: str, questions: list[Any]) -> Any:
    asked = ["--load", load, "--distributed-backend", "gloo", *layout]
    with opened(parse_request(DataParallel, asked, prog="answers")) as trained:
        answers = Answers(SplitGPT(trained.model, trained.world.device), trained.tokenizer, 3)
        return getattr(answers, name)(questions)


LAYOUTS = [
    (2, []),
    (2, ["--tensor-model-parallel-size", "2"]),
    (2, ["--pipeline-model-parallel-size", "2"]),
]


@pytest.mark.parametrize(("ranks_needed", "layout"), LAYOUTS)
def test_answers_are_those_of_transformers(
    ranks: Ranks, load: str, reference: Reference, ranks_needed: int, layout: list[str]
) -> None:
    texts = reference.passages[:5]
    said = reference.tokenizer.decode(reference.greedy(reference.ids(texts[0][:80]), 3))
    pairs = [(text[:50], text[50:70]) for text in texts] + [(texts[0][:80], said), ("", "A cat"), (texts[1], "")]
    for found in ranks(ranks_needed, answered, load, layout, "likelihoods", pairs):
        for (context, continuation), (likelihood, best) in zip(pairs, found, strict=True):
            given = reference.ids(context.rstrip())
            ids = reference.ids(context + continuation)
            if len(ids) == len(given):
                assert (likelihood, best) == (0, True)
                continue
            scored, ids = len(ids) - len(given), ids if given else [reference.end, *ids]
            with torch.no_grad():
                expected = reference.scores(ids, scored).sum().item()
                likeliest = reference.logits(ids, scored).argmax(dim=1).tolist()
            assert likelihood == pytest.approx(expected, rel=1e-4)
            assert best == (likeliest == ids[-scored:])
        assert [best for _, best in found].count(True) >= 1

    for found in ranks(ranks_needed, answered, load, layout, "whole_texts", [*texts, ""]):
        for text, likelihood in zip([*texts, ""], found, strict=True):
            assert likelihood == pytest.approx(whole_text(reference, text), rel=1e-4)

    wishes = [Wish(texts[0], 5), Wish(texts[1][:60], 4, ("\x00",)), Wish("", 3), Wish(texts[0], 400)]
    prompts = [reference.ids(texts[0])[5 - LENGTH :], reference.ids(texts[1][:60]), [reference.end]]
    prompts.append(reference.ids(texts[0])[-LENGTH // 2 :])
    lengths = [5, 4, 3, LENGTH // 2 + 1]  # the last one as long as the context lets it be
    expected = [reference.greedy(ids, length) for ids, length in zip(prompts, lengths, strict=True)]
    assert all(reference.end not in ids for ids in expected)
    for found in ranks(ranks_needed, answered, load, layout, "written", wishes):
        assert found == [reference.tokenizer.decode(ids) for ids in expected]


@torch.no_grad()
def whole_text(reference: Reference, text: str) -> float:
    """Each token in windows one after another; the last one goes back to be full."""
    ids = [reference.end, *reference.ids(text)]
    total, done = 0.0, 1
    while done < len(ids):
        new = min(LENGTH, len(ids) - done)
        total += reference.scores(ids[max(0, done + new - LENGTH - 1) : done + new], new).sum().item()
        done += new
    return total


def harnessed(rank: int, world_size: int, words: list[str]) -> dict[str, dict[str, Any]]:
    from megatron.tasks.harness import HarnessRequest, evaluate

    return evaluate(parse_request(HarnessRequest, [*words, "--distributed-backend", "gloo"], prog="harness"))


TASK = """task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def test_the_evaluation_harness(ranks: Ranks, load: str, reference: Reference, tmp_path: Path) -> None:
    """A task of a local file: each question's choice is the likeliest by the library's own figures."""
    pytest.importorskip("lm_eval", reason="lm-eval, which is optional, is not installed")
    choices = ["the", "of", "was"]
    questions = [{"question": text[:60], "choices": choices, "answer": 0} for text in reference.passages[:12]]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(one) for one in questions))
    (tmp_path / "toy.yaml").write_text(TASK.format(folder=tmp_path))
    hits = 0
    with torch.no_grad():
        for one in questions:
            given = reference.ids(one["question"].rstrip())
            whole = [reference.ids(f"{one['question']} {choice}") for choice in choices]
            chances = [reference.scores(ids, len(ids) - len(given)).sum().item() for ids in whole]
            hits += max(range(3), key=chances.__getitem__) == 0
    assert 0 < hits < 12
    results = tmp_path / "results.json"
    asked = ["--load", load, "--tasks", "toy_choice", "--include-path", str(tmp_path), "--output-path", str(results)]
    for found in ranks(2, harnessed, [*asked, "--tensor-model-parallel-size", "2"]):
        if found:
            assert found["toy_choice"]["acc,none"] == pytest.approx(hits / 12)
    assert json.loads(results.read_text())["toy_choice"]["acc,none"] == pytest.approx(hits / 12)


def test_what_the_harness_needs_is_told(load: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from megatron.tasks import harness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "lm_eval", None)
        asked = ["--load", load, "--tasks", "nowhere.yaml", "--include-path", str(tmp_path / "none")]
        asked += ["--output-path", str(tmp_path), "--limit", "0"]
        (limit,) = complaints(capsys, asked, harness.main)
        assert limit == "--limit 0: it must be at least 1"
        absent = complaints(capsys, asked[:-2], harness.main)
    assert 'pip install "megatron[lm-eval]"' in absent[0]
    assert absent[1:] == [
        "--tasks nowhere.yaml: there is no such file",
        f"--include-path {tmp_path / 'none'}: there is no such folder",
        f"--output-path {tmp_path}: it is a folder, and must be a file",
    ]


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        ({}, Wish("c", 9)),
        ({"until": "\n", "max_gen_toks": 3, "do_sample": False}, Wish("c", 3, ("\n",))),
        ({"until": ["a", ""], "max_new_tokens": 4, "num_beams": 1, "top_p": None}, Wish("c", 4, ("a",))),
        ({"temperature": 2, "top_k": 5}, Wish("c", 9, (), SamplingConfig(temperature=2, top_k=5))),
        ({"do_sample": True, "top_p": 0.5}, Wish("c", 9, (), SamplingConfig(top_p=0.5))),
    ],
)
def test_what_a_task_asks_for_is_written(asked: dict[str, Any], wish: Wish) -> None:
    assert wish_of("c", asked, length=9) == wish


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"num_beams": 4}, "generation_kwargs num_beams 4: accepted are until, do_sample, "),
        ({"temperature": "hot"}, "generation_kwargs temperature 'hot': it is of a wrong kind"),
        ({"max_gen_toks": True}, "generation_kwargs max_gen_toks True: it is of a wrong kind"),
        ({"max_tokens": -1}, "generation_kwargs: -1 tokens: they must be at least 0"),
        ({"top_p": 3, "do_sample": True}, "--top-p 3: it must be from 0 to 1"),
    ],
)
def test_what_a_task_cannot_ask_for_is_told(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        wish_of("c", asked, length=9)


def test_tasks_that_are_none_are_told(load: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In one sentence, whatever the harness stumbles over before it asks the model."""
    pytest.importorskip("lm_eval", reason="lm-eval, which is optional, is not installed")
    good = TASK.format(folder=tmp_path)
    cases = {
        "broken": ("task: [\n", "ParserError: "),
        "none": ("", "ValueError: "),
        "kind": (good.replace("multiple_choice", "nonsense"), "ValueError: Got invalid output_type 'nonsense'"),
        "data": (good.replace("questions.jsonl", "nowhere.jsonl"), "FileNotFoundError: "),
    }
    for name, (text, reason) in cases.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        (told,) = complaints(capsys, ["--load", load, "--tasks", str(path), "--distributed-backend", "gloo"], main)
        assert told.startswith(f"--tasks {path}: the harness cannot begin with it: {reason}"), told
