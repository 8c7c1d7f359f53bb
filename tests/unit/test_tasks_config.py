"""The flags of Megatron-LM's scripts for fine-tuning are taken; an epoch has as many iterations as batches."""

import pytest

from megatron.base.complaints import ConfigError
from megatron.tasks.config import FinetuneConfig
from megatron.tasks.resolving import resolved
from megatron.training.arguments import parse_composed

# Those that its script for RACE passes, and --keep-last, which is about batches there.
SCRIPT = """
    --task RACE --seed 1234 --train-data RACE/train/middle RACE/train/high --valid-data RACE/dev/middle RACE/dev/high
    --tokenizer-type BertWordPieceLowerCase --vocab-file bert-vocab.txt --epochs 3 --pretrained-checkpoint bert
    --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --checkpoint-activations
    --micro-batch-size 4 --lr 1.0e-5 --lr-decay-style linear --lr-warmup-fraction 0.06 --seq-length 512
    --max-position-embeddings 512 --save-interval 100000 --save race --log-interval 10 --eval-interval 100
    --eval-iters 50 --weight-decay 1.0e-1 --clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1 --fp16
    --keep-last
"""


def parsed(*more: str, ranks: int = 8) -> FinetuneConfig:
    return parse_composed(FinetuneConfig, [*SCRIPT.split(), *more], world_size=ranks, check_inputs=False)


def test_the_flags_of_a_script_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    config = parsed("--keep-last-checkpoints", "2")
    assert config.task.train_data == ("RACE/train/middle", "RACE/train/high")
    assert config.task.epochs == 3 and config.task.keep_last and config.checkpoint.keep_last is None
    assert config.precision.fp16 and config.schedule.lr_warmup_fraction == 0.06
    assert config.recompute.granularity == "full"
    told = capsys.readouterr().out
    assert "--eval-interval is ignored: each epoch ends" in told and "--eval-iters is ignored" in told
    assert resolved(config, 87_866, 8, 0).checkpoint.keep_last == 2


@pytest.mark.parametrize(("keep_last", "each"), [(True, 2746), (False, 2745)])
def test_an_epoch_of_race_has_as_many_iterations_as_batches(keep_last: bool, each: int) -> None:
    """87,866 questions in batches of 32, the last of 26."""
    config = resolved(parsed("--keep-last" if keep_last else "--no-keep-last"), 87_866, 8, 0)
    assert (config.training.eval_interval, config.training.train_iters) == (each, 3 * each)
    assert config.training.eval_at_start is False


def test_flags_that_fit_no_task_of_this_kind_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed("--train-iters", "5", "--skip-malformed-lines")
    assert caught.value.problems == [
        "--train-iters is not known; --epochs asks for the same here",
        "--skip-malformed-lines: it is for the lines of MNLI and QQP, and RACE's files have none",
    ]
    assert parsed("--task", "QQP", "--skip-malformed-lines").task.skip_malformed_lines


def test_only_evaluating_takes_weights_alone_and_saves_nothing() -> None:
    config = resolved(parsed("--epochs", "0", "--load", "race"), 10, 8, 0)
    assert config.training.train_iters == 0 and config.checkpoint.finetune and config.checkpoint.save is None
    assert config.combination_problems(8) == []
