"""Blends: the greedy rule of Megatron-LM 2.5, its bounds, what flags accept, samples and reports."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.data import DataConfig, GPTDataset, IndexedDataset, build_gpt_datasets
from megatron.data.blend import Blend, BlendedDataset, TokenStores, parse_blend, samples_of_each
from megatron.data.blend_order import draw_order
from tests.harness.token_files import write_token_files

EXAMPLE = [0, 1, 0, 2, 0, 0, 1, 0, 0, 0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 0]


def plain_order(shares: list[float], n: int) -> list[int]:
    """The rule, one choice after another."""
    taken, order = [0] * len(shares), []
    for i in range(n):
        missing = [share * max(i, 1) - count for share, count in zip(shares, taken, strict=True)]
        order.append(missing.index(max(missing)))
        taken[order[-1]] += 1
    return order


def write_set(folder: Path, name: str, first: int, documents: int = 20) -> str:
    """Documents of 5 tokens, counted through from `first`."""
    return write_token_files(
        folder / name, [[list(range(first + 5 * d, first + 5 * d + 5))] for d in range(documents)], 4
    )


def blended(folder: Path, weights: list[float], n: int = 40, **changes: object) -> BlendedDataset:
    words: list[str] = []
    for k, weight in enumerate(weights):
        words += [str(weight), write_set(folder, f"set{k}", 1000 * k)]
    config = DataConfig(**{"data_path": tuple(words), "seq_length": 4, "split": "1,0,0"} | changes)
    train = build_gpt_datasets(config, num_samples=(n, 0, 0), seed=3, eod_id=None)[0]
    assert isinstance(train, BlendedDataset)
    return train


def test_equal_to_the_example_of_the_reference() -> None:
    shares = Blend(("a", "b", "c"), (0.7, 0.2, 0.1)).shares()
    assert shares == [0.7, 0.2, 0.1]  # though 0.7 + 0.2 + 0.1 is not 1 in floating point
    sets, numbers, _, _ = draw_order(np.array(shares), 20)
    assert sets.dtype == np.uint8
    assert numbers.dtype == np.int64
    assert sets.tolist() == EXAMPLE
    assert draw_order(np.array(shares) / sum(shares), 20)[0].tolist() != EXAMPLE


WEIGHTS = st.lists(st.floats(0.001, 100) | st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=150)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 400))
def test_equal_to_the_plain_rule_and_within_its_bounds(weights: list[float], n: int) -> None:
    shares = Blend(("x",) * len(weights), tuple(weights)).shares()
    sets, numbers, ahead, behind = draw_order(np.array(shares), n)
    assert sets.tolist() == plain_order(shares, n)
    taken = np.cumsum(np.eye(len(shares), dtype=np.int64)[sets], axis=0)  # [n, sets]
    assert (numbers == taken[np.arange(n), sets] - 1).all()
    deviation = taken - np.arange(1, n + 1)[:, None] * np.array(shares)
    assert ahead == pytest.approx(deviation.max(), abs=1e-9)
    assert behind == pytest.approx(max(0.0, -deviation.min()), abs=1e-9)
    assert ahead <= 1 + 1e-9
    assert behind <= 2
    assert (taken[-1] <= samples_of_each(shares, n)).all()


@pytest.mark.parametrize("kind", ["equal", "random", "steep", "few kinds", "one large"])
def test_a_thousand_sets(kind: str) -> None:
    random = np.random.default_rng(1)
    weights = {
        "equal": np.ones(1000),
        "random": random.random(1000) + 1e-3,
        "steep": 1.0 / np.arange(1, 1001),
        "few kinds": random.choice([1.0, 2.0, 3.0], 1000),
        "one large": np.array([1e6] + [1.0] * 999),
    }[kind]
    shares = Blend(("x",) * 1000, tuple(weights.tolist())).shares()
    sets, numbers, ahead, behind = draw_order(np.array(shares), 4000)
    assert sets.dtype == np.uint16
    array, taken, order, ordinals = np.array(shares), np.zeros(1000), [], []
    for i in range(4000):
        order.append(int(np.argmax(array * max(i, 1) - taken)))
        ordinals.append(int(taken[order[-1]]))
        taken[order[-1]] += 1
    assert sets.tolist() == order
    assert numbers.tolist() == ordinals
    assert ahead <= 1 + 1e-9
    assert behind <= 2


def test_the_order_stays_exact_where_choices_are_many() -> None:
    """Sums grow, and with them what rounding makes of near ties: against an argmax over all sets at each choice."""
    shares = Blend(("x",) * 40, tuple((np.random.default_rng(2).integers(1, 30, 40) / 7).tolist())).shares()
    array, taken, order = np.array(shares), np.zeros(40), []
    for i in range(60_000):
        order.append(int(np.argmax(array * max(i, 1) - taken)))
        taken[order[-1]] += 1
    assert draw_order(array, 60_000)[0].tolist() == order


def test_words_that_are_no_blend_are_told_together() -> None:
    assert parse_blend(["p"], "--data-path") == Blend(("p",), (1.0,))
    assert parse_blend(["3", "p", "1e1", "q"], "--data-path") == Blend(("p", "q"), (3.0, 10.0))
    with pytest.raises(ConfigError) as caught:
        parse_blend(["x", "p", "-1", "q", "nan", "r", "inf", "s", "0", "t", "1", "u"], "--data-path")
    assert [line.split(":")[0] for line in caught.value.problems] == [
        f"--data-path {words}" for words in ("x p", "-1 q", "nan r", "inf s", "0 t")
    ]
    with pytest.raises(ValueError, match="--data-path p q r: it takes one token set, or pairs"):
        parse_blend(["p", "q", "r"], "--data-path")


def test_flags_that_exclude_each_other_and_sets_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-path and --valid-data-path"):
        DataConfig(seq_length=4, data_path=("p",), valid_data_path=("q",))
    with pytest.raises(ConfigError, match="--train-data-path is missing: --test-data-path"):
        DataConfig(seq_length=4, test_data_path=("q",))
    with pytest.raises(ConfigError) as caught:
        DataConfig(seq_length=4, train_data_path=("x", "p", "1", "q"), valid_data_path=("1", "q", "r"))
    assert len(caught.value.problems) == 2
    there = write_set(tmp_path, "there", 0)
    nowhere = (str(tmp_path / "no"), str(tmp_path / "nor"))
    config = DataConfig(seq_length=4, data_path=("1", nowhere[0], "1", there, "1", nowhere[1]))
    told = config.input_problems()
    assert [line.split(": ")[0] for line in told] == [f"--data-path {prefix}" for prefix in nowhere]
    with pytest.raises(ConfigError) as missing:
        build_gpt_datasets(config, num_samples=(4, 0, 0), seed=1, eod_id=None)
    assert missing.value.problems == told


def test_samples_come_from_the_sets_in_their_own_order(tmp_path: Path) -> None:
    train = blended(tmp_path, [0.7, 0.2, 0.1], n=20)
    assert train.set_numbers.tolist() == EXAMPLE
    assert len(train) == 20
    taken = [0, 0, 0]
    for i, k in enumerate(EXAMPLE):
        indexed = IndexedDataset(str(tmp_path / f"set{k}"))
        alone = GPTDataset(indexed, range(20), samples_of_each([0.7, 0.2, 0.1], 20)[k], 4, seed=3)
        for name, values in alone[taken[k]].items():
            np.testing.assert_array_equal(train[i][name], values)
        taken[k] += 1


def test_the_report_tells_deviation_and_epochs(tmp_path: Path) -> None:
    first, *others = blended(tmp_path, [0.7, 0.2, 0.1], n=20).report()
    assert first.startswith("train: 20 samples from 3 token sets; ")
    assert "at most 0.60 samples ahead of its share and 0.90 behind" in first
    # 14 of 20 samples of 4 tokens of 100
    assert others[0] == f"  {tmp_path / 'set0'}: 14 samples, 70.0000% for the asked 70.0000%, 0.560 epochs"
    assert len(others) == 3


def test_each_set_is_split_alike_and_one_without_a_share_is_left_out(tmp_path: Path) -> None:
    large, small = write_set(tmp_path, "large", 0, 40), write_set(tmp_path, "small", 1000, 2)
    config = DataConfig(data_path=("1", large, "3", small), seq_length=3, split="8,2,0")
    train, valid, test = build_gpt_datasets(config, num_samples=(60, 12, 5), seed=1, eod_id=None)
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, GPTDataset)  # 20 % of two documents are none
    assert test is None
    seen = np.concatenate([train[i]["tokens"] for i in range(60)])
    assert set(np.unique(seen)) <= {*range(160), *range(1000, 1010)}
    assert (seen >= 1000).sum() == 45 * 3
    assert np.concatenate([valid[i]["tokens"] for i in range(12)]).min() >= 160
    assert valid.indexed is not train.indexed or len(train.datasets) == 2
    said = "  left out, as --split gives this share none of their documents: "
    assert valid.report()[1:] == [said + small]
    assert not any("left out" in line for line in train.report())


def test_however_small_the_set_that_is_left_out_the_others_stay_within_the_bounds(tmp_path: Path) -> None:
    weights = (0.5, 0.4991, 0.0009)
    names = [write_set(tmp_path, name, 1000 * k, 40 if k < 2 else 2) for k, name in enumerate("abc")]
    words = tuple(word for weight, name in zip(weights, names, strict=True) for word in (str(weight), name))
    config = DataConfig(data_path=words, seq_length=3, split="8,2,0")
    train, valid, _ = build_gpt_datasets(config, num_samples=(60, 20_000, 0), seed=1, eod_id=None)
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert train.shares == list(weights)  # nothing is left out: to the last bit as given
    assert valid.shares == [0.5 / 0.9991, 0.4991 / 0.9991]
    taken = np.cumsum(np.eye(2, dtype=np.int64)[valid.set_numbers], axis=0)  # [n, sets]
    deviation = taken - np.arange(1, 20_001)[:, None] * np.array([5000, 4991]) / 9991
    assert deviation.max() <= 1 + 1e-6
    assert deviation.min() >= -2
    assert valid.report()[-1].endswith(names[2])


def test_sets_that_a_blend_leaves_out_of_a_share_are_told(tmp_path: Path) -> None:
    words: list[str] = []
    for k in range(14):
        words += ["1", write_set(tmp_path, f"set{k}", 0, 40 if k < 2 else 2)]
    config = DataConfig(data_path=tuple(words), seq_length=3, split="8,2,0")
    train, valid, _ = build_gpt_datasets(config, num_samples=(60, 12, 0), seed=1, eod_id=None)
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert len(train.report()) == 1 + 14
    assert len(valid.report()) == 1 + 2 + 1
    named = ", ".join(str(tmp_path / f"set{k}") for k in range(2, 12))
    assert valid.report()[-1].endswith(f"none of their documents: {named} and 2 more")


def test_sets_for_each_share(tmp_path: Path) -> None:
    a, b, c = (write_set(tmp_path, name, 1000 * k) for k, name in enumerate("abc"))
    config = DataConfig(seq_length=4, train_data_path=("1", a, "1", b), valid_data_path=(c,))
    train, valid, test = build_gpt_datasets(config, num_samples=(24, None, 9), seed=1, eod_id=None)
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, GPTDataset)
    assert test is None
    assert len(valid) == 24  # one pass over all of it
    assert {int(train[i]["tokens"][0]) // 1000 for i in range(24)} == {0, 1}
    with pytest.raises(ValueError, match="no single pass"):
        build_gpt_datasets(config, num_samples=(None, 0, 0), seed=1, eod_id=None)


def test_too_small_sets_are_told_together(tmp_path: Path) -> None:
    sets = [write_set(tmp_path, name, 0, 1) for name in ("a", "b")]
    config = DataConfig(data_path=("1", sets[0], "1", sets[1]), seq_length=9, split="1,0,0")
    with pytest.raises(ConfigError) as caught:
        build_gpt_datasets(config, num_samples=(4, 0, 0), seed=1, eod_id=None)
    assert [line.split(":")[0] for line in caught.value.problems] == sets


def test_the_ids_of_every_set_are_found(tmp_path: Path) -> None:
    train = blended(tmp_path, [0.9, 0.1])
    assert isinstance(train.indexed, TokenStores)
    assert train.indexed.max_token_id() == 1099
    assert max(train.indexed.max_token_id(part, 4) for part in range(4)) == 1099
    assert train.indexed.max_token_id(0, 4) == 1024


def test_a_thousand_sets_are_opened(tmp_path: Path) -> None:
    words: list[str] = []
    for k in range(1000):
        words += ["1", write_token_files(tmp_path / f"s{k}", [[[k] * 6]], 4)]
    config = DataConfig(data_path=tuple(words), seq_length=4, split="1,0,0", data_cache_path=str(tmp_path / "c"))
    train = build_gpt_datasets(config, num_samples=(1000, 0, 0), seed=1, eod_id=None)[0]
    assert train is not None
    assert sorted(int(train[i]["tokens"][0]) for i in range(1000)) == list(range(1000))
    assert len(train.report()) == 1001


def test_sets_beyond_the_limit_of_open_files_are_opened(tmp_path: Path) -> None:
    """Under the soft limit of many systems two files of each set would be too many."""
    words: list[str] = []
    for k in range(60):
        words += ["1", write_token_files(tmp_path / f"s{k}", [[[k] * 6]], 4)]
    program = (
        "import resource, sys\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from megatron.data.blend import parse_blend\n"
        "from megatron.data.token_sets import open_token_sets\n"
        "sets = open_token_sets(parse_blend(sys.argv[1:], '--data-path'), '--data-path')\n"
        "print(len(sets), resource.getrlimit(resource.RLIMIT_NOFILE) == (60 * 11 + 512, hard))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "60 True\n"), done.stderr
