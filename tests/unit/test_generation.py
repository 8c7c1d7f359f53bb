"""Choosing tokens and continuing a prompt, on logits that a test can reason about."""

import pytest
import torch

from megatron.tasks.generation import generate, sample_tokens


def counting_logits(tokens: torch.Tensor) -> torch.Tensor:
    """A "model" of 10 ids that always expects the next number: [b, s] -> [b, s, 10]."""
    return 5.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert sample_tokens(logits, temperature=0).tolist() == [1, 0]


def test_sampling_follows_the_softmax_of_the_scaled_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(20_000, 3)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(sample_tokens(logits, temperature=2.0, generator=generator), minlength=3)
    torch.testing.assert_close(counts / 20_000, (logits[0] / 2).softmax(0), atol=0.012, rtol=0)


def test_top_k_leaves_out_the_others() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(2_000, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(sample_tokens(logits, top_k=2, generator=generator).tolist()) == {2, 3}
    assert set(sample_tokens(logits, top_k=9, generator=generator).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}])
def test_negative_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="neither may be negative"):
        sample_tokens(torch.zeros(1, 3), **wrong)  # type: ignore[arg-type]


def test_generation_goes_on_within_the_context_and_ends_behind_eod() -> None:
    seen = []

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return counting_logits(tokens)

    assert generate(logits_of, [1, 2], length=5, context=3, temperature=0) == [3, 4, 5, 6, 7]
    assert seen == [2, 3, 3, 3, 3]
    assert generate(counting_logits, [1], length=50, context=8, eod=4, temperature=0) == [2, 3, 4]
    assert generate(counting_logits, [1], length=0, context=8) == []
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(counting_logits, [], length=1, context=8)


def test_a_seed_repeats_its_text_and_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    texts = [generate(counting_logits, [1], length=30, context=8, temperature=4.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)
