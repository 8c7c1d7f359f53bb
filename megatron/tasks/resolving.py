"""How long a fine-tuning is, once its examples are counted."""

import dataclasses

from megatron.base.complaints import raise_joined
from megatron.checkpointing import DamageError, read_state
from megatron.tasks.config import FinetuneConfig, TaskScheduleConfig
from megatron.tasks.epochs import iterations_per_epoch


def resolved(config: FinetuneConfig, examples: int, ranks: int, iteration: int) -> FinetuneConfig:
    """The config of a run over `examples` examples, whose iterations are now known, that begins behind `iteration`.

    An evaluation comes at the end of each epoch; a run that goes on from there evaluates first, for it may have been
    ended before it could. One that only evaluates has no iterations, takes the weights of `--load` alone and saves
    nothing. Raises `ConfigError` where the numbers do not fit, also those of the checkpoint that a run goes on from.
    """
    if config.task.only_evaluates:
        return _evaluating(config)
    batch, epochs = config.batch_schedule(ranks).global_batch_size, config.task.epochs or 0
    each = iterations_per_epoch(examples, batch, keep_last=config.task.keep_last)
    if each == 0:
        raise ValueError(
            f"--global-batch-size {batch}: --train-data has only {examples} examples, give a smaller one, or "
            "--keep-last to train on what fills no batch"
        )
    if iteration > 0:
        _check_going_on(config, each, iteration)
    training = dataclasses.replace(
        config.training,
        train_iters=each * epochs,
        eval_interval=each,
        eval_at_start=config.training.eval_at_start or (iteration > 0 and iteration % each == 0),
    )
    checkpoint = dataclasses.replace(config.checkpoint, keep_last=config.checkpoint.keep_last_checkpoints)
    whole = dataclasses.replace(config, training=training, checkpoint=checkpoint)
    raise_joined(whole.combination_problems(ranks))
    return whole


def check_kind(config: FinetuneConfig, iteration: int) -> None:
    """Raise ValueError where the checkpoint of `--load` is not of the task's kind of model."""
    load = config.checkpoint.load or ""
    try:
        kind = read_state(load, iteration).get("model", {}).get("model", "a model of another kind")
    except DamageError:
        return  # told when it is loaded, or another is loaded
    if kind != config.chosen.kind.kind:
        raise ValueError(
            f"--load {load}: its checkpoint is of {kind}, and a model fine-tuned for {config.task.task} is "
            f"{config.chosen.kind.kind}; --pretrained-checkpoint takes the encoder of any BERT"
        )


def _evaluating(config: FinetuneConfig) -> FinetuneConfig:
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, train_iters=0, eval_interval=1),
        checkpoint=dataclasses.replace(config.checkpoint, save=None, save_interval=None, finetune=True),
        schedule=_without_warm_up(config.schedule),
    )


def _without_warm_up(schedule: TaskScheduleConfig) -> TaskScheduleConfig:
    return dataclasses.replace(schedule, lr_warmup_iters=0, lr_warmup_samples=0, lr_warmup_fraction=None)


def _check_going_on(config: FinetuneConfig, each: int, iteration: int) -> None:
    """Raise ValueError where epochs are not as long as those of the checkpoint, or it is beyond them all."""
    load, epochs = config.checkpoint.load or "", config.task.epochs or 0
    if iteration > each * epochs:
        raise ValueError(
            f"--epochs {epochs}: they are {each * epochs} iterations, and the checkpoint in {load} is of iteration "
            f"{iteration} already"
        )
    try:
        before = read_state(load, iteration).get("config", {}).get("training", {}).get("eval_interval", each)
    except DamageError:
        return  # told when it is loaded, or another is loaded
    if before != each:
        raise ValueError(
            f"--load {load}: its epochs have {before} iterations, and here they have {each}: go on with its "
            "--train-data, --global-batch-size and --keep-last, or --finetune to begin anew with its weights"
        )
