"""Which validation samples an evaluation sees: the same, or always the next ones, also of a run that goes on."""

import pytest

from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.run import check_progress, first_evaluated, sample_counts
from megatron.training.state import RunState
from tests.harness.runs import flags


def config_of(**changes: object) -> RunConfig:
    return parse_composed(RunConfig, flags("data", **changes), world_size=1, check_inputs=False)


@pytest.mark.parametrize("iterations", [4, 5, 9, 10, 11])
@pytest.mark.parametrize("length", ["train_iters", "train_samples"])
def test_moving_samples_are_dealt_out_as_by_a_counter(iterations: int, length: str) -> None:
    config = config_of(
        eval_samples="moving",
        eval_interval=5,
        eval_iters=3,
        lr_warmup_iters=None,
        **{"train_iters": None, length: iterations * (1 if length == "train_iters" else 8)},
    )
    counter = 0
    for iteration in range(1, iterations + 1):
        # Between two multiples it is at the start of a run that goes on from there, and sees what comes next.
        assert first_evaluated(config, 1, iteration) == counter
        counter += 3 * 8 if iteration % 5 == 0 else 0
    assert first_evaluated(config, 1, iterations, at_end=True) == counter
    assert sample_counts(config, 1)[1:] == (counter + 3 * 8, 3 * 8)
    assert first_evaluated(config, 1, 0) == 0


def test_the_same_samples_are_the_first_ones() -> None:
    config = config_of(eval_interval=5, eval_iters=3)
    assert {first_evaluated(config, 1, n, at_end=end) for n in range(12) for end in (False, True)} == {0}
    assert sample_counts(config, 1)[1:] == (24, 24)


def test_a_run_that_was_begun_with_smaller_batches_has_too_few_samples_to_move_on() -> None:
    """20 iterations of 2 samples are behind it, so that it ends with iteration 25; from the start they would be 10."""
    chosen = {"train_iters": None, "train_samples": 80, "lr_warmup_iters": None, "eval_interval": 5}
    state = RunState(iteration=20, consumed_samples=40)
    check_progress(config_of(**chosen), state, 1)
    with pytest.raises(ValueError, match="--eval-samples moving: the run ends with iteration 25"):
        check_progress(config_of(eval_samples="moving", **chosen), state, 1)
