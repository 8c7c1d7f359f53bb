"""Choosing tokens: against the softmax, on logits that a test can reason about."""

import math

import pytest
import torch

from megatron.base.complaints import ConfigError
from megatron.tasks.sampling import SamplingConfig, candidates, choose


def kept(logits: list[float], **settings: float) -> dict[int, float]:
    """The probability of each id that may be chosen."""
    ids, probabilities = candidates(torch.tensor(logits), SamplingConfig(**settings))  # type: ignore[arg-type]
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"greedy": True}])
def test_greedy_takes_the_likeliest_and_of_equals_the_first(settings: dict[str, float]) -> None:
    assert kept([0.0, 3.0, 1.0, 3.0], **settings) == {1: 1.0}


def test_the_temperature_divides_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -5.0])
    found = kept(logits.tolist(), temperature=2.0)
    expected = torch.exp(logits.double() / 2)
    assert found == pytest.approx(dict(enumerate((expected / expected.sum()).tolist())))
    assert kept([1.0, 1e4, -1e4], temperature=1e-300) == {0: 0.0, 1: 1.0, 2: 0.0}


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert kept(logits, top_k=2) == pytest.approx({1: 4 / 7, 3: 3 / 7})
    assert set(kept(logits, top_k=9)) == set(kept(logits, top_p=1.0)) == set(kept(logits, top_p=0.0)) == {0, 1, 2, 3}
    assert set(kept(logits, top_p=0.3)) == {1}
    assert kept(logits, top_p=0.65) == pytest.approx({1: 4 / 7, 3: 3 / 7})
    assert set(kept(logits, top_p=0.75)) == {1, 3, 2}
    # of the three that top-k leaves, two have more than 0.75 of what is left
    assert kept(logits, top_p=0.75, top_k=3) == pytest.approx({1: 4 / 7, 3: 3 / 7})
    assert set(kept([0.0, 0.0, 0.0, -1.0], top_k=2)) == {0, 1}


def test_draws_follow_the_probabilities_and_take_one_number_each() -> None:
    logits, draws = torch.tensor(logs(0.5, 1e-30, 0.2, 0.3)), 20_000
    generator, counter = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    ids = [choose(logits, SamplingConfig(top_p=0.999), generator) for _ in range(draws)]
    counts = torch.bincount(torch.tensor(ids), minlength=4) / draws
    torch.testing.assert_close(counts, torch.tensor([0.5, 0.0, 0.2, 0.3]), atol=0.012, rtol=0)
    torch.rand(draws, dtype=torch.float64, generator=counter)
    assert torch.equal(torch.rand(1, generator=generator), torch.rand(1, generator=counter))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_told(wrong: float) -> None:
    with pytest.raises(FloatingPointError, match="no numbers"):
        kept([0.0, wrong, 1.0])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 1.5}, "--top-p 1.5: it must be from 0 to 1"),
        ({"top_p": math.nan}, "--top-p nan"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SamplingConfig(**wrong)  # type: ignore[arg-type]
