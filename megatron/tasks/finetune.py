"""Fine-tuning: `pretrain` over epochs of examples, with an evaluation of all of them after each."""

import dataclasses
from collections.abc import Sequence

import torch

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import iterations_to_load
from megatron.model import BertEncoder, build_bert
from megatron.tasks.best import Best
from megatron.tasks.config import FinetuneConfig, TaskScheduleConfig
from megatron.tasks.epochs import Epochs, iterations_per_epoch
from megatron.tasks.examples import Example, ExampleSet, pair_ids
from megatron.tasks.predictions import count_correct, count_words
from megatron.tasks.pretrained import load_encoder
from megatron.tasks.scoring import forward_step, predictions_of, score
from megatron.tasks.task import Files
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.failure import mistakes
from megatron.training.flops import flops_per_sample
from megatron.training.loop import pretrain
from megatron.training.observers import Metrics, Observer
from megatron.training.run import Run, SampleCounts
from megatron.training.setup import world_size
from megatron.training.state import Trainee

# An encoder makes no logits.
_NO_VOCABULARY = 0


class Finetuning:
    """What `pretrain` is handed to fine-tune for a task.

    Args:
        config: the flags, with the number of iterations (`resolved`).
        training, validation: the examples.
        loads: whether the weights come from `--load`.
        report: sentences on what was read.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        training: ExampleSet,
        validation: ExampleSet,
        vocab_size: int,
        loads: bool,
        report: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._training = training
        self._validation = validation
        self._vocab_size = vocab_size
        self._loads = loads
        self._report = list(report)
        self._best = Best(config)

    def provide_model(self, dtype: torch.dtype, device: torch.device) -> BertEncoder:
        """This rank's part of the model, its encoder out of `--pretrained-checkpoint` unless `--load` has the whole."""
        config, pretrained = self._config, self._config.task.pretrained_checkpoint
        model = build_bert(
            config.model,
            self._vocab_size,
            config.training.seed,
            dtype=dtype,
            device=device,
            kind=config.chosen.kind,
            sequence_parallel=config.distributed.sequence_parallel,
            recompute=config.recompute,
            stages=config.stages_of(mpu.get_pipeline_model_parallel_rank(), _NO_VOCABULARY),
            **config.chosen.options,
        )
        if pretrained is not None and not self._loads:
            with mistakes():
                self._report += load_encoder(model, pretrained)
        return model

    def provide_datasets(self, counts: SampleCounts) -> tuple[Epochs, None, None]:
        """The examples in the order of training; the evaluator has those of validation."""
        config = self._config
        return (
            Epochs(
                self._training,
                config.task.epochs or 1,
                batch=config.batch_schedule(world_size()).global_batch_size,
                seed=config.training.seed,
                keep_last=config.task.keep_last or config.task.only_evaluates,
                report=self._report,
            ),
            None,
            None,
        )

    def evaluate(self, run: Run, split: str) -> Metrics | None:
        """Accuracy on all examples of validation. Collectives: those of `score`, and of `Best.offer`."""
        if split != "validation":
            return None
        classes = self._config.chosen.classes
        scores, loss = score(run, self._validation, len(classes))
        predictions = predictions_of(self._validation, scores, classes)
        counts = count_correct(predictions)
        epoch = run.trainee.state.iteration // self._config.training.eval_interval
        run.audience.on_message(f"epoch {epoch}: {count_words(counts)}")
        self._best.offer(run, epoch, predictions)
        groups = {f"{group}-{name}": n for group, c in counts.items() for name, n in c._asdict().items()}
        return {"epoch": epoch, "loss": loss, "accuracy": counts["all"].accuracy, **groups}


def resolved(config: FinetuneConfig, examples: int, ranks: int, iteration: int) -> FinetuneConfig:
    """The config of a run over `examples` examples, whose iterations are now known, that begins behind `iteration`.

    A run that only evaluates has no iterations, takes the weights of `--load` alone and saves nothing. One that goes on
    at the end of an epoch evaluates first: it may have been ended before it could. Raises `ConfigError`.
    """
    batch = config.batch_schedule(ranks).global_batch_size
    each = iterations_per_epoch(examples, batch, keep_last=config.task.keep_last)
    if config.task.only_evaluates:
        total, each = 0, 1
        checkpoint = dataclasses.replace(config.checkpoint, save=None, save_interval=None, finetune=True)
        config = dataclasses.replace(config, schedule=_without_warm_up(config.schedule))
    else:
        total = each * (config.task.epochs or 0)
        checkpoint = dataclasses.replace(config.checkpoint, keep_last=config.checkpoint.keep_last_checkpoints)
    if each == 0:
        raise ValueError(
            f"--global-batch-size {batch}: --train-data has only {examples} examples, give a smaller one, or "
            "--keep-last to train on what fills no batch"
        )
    at_end_of_epoch = iteration > 0 and iteration % each == 0
    training = dataclasses.replace(
        config.training,
        train_iters=total,
        eval_interval=each,
        eval_at_start=config.training.eval_at_start or at_end_of_epoch,
    )
    whole = dataclasses.replace(config, training=training, checkpoint=checkpoint)
    raise_joined(whole.combination_problems(ranks))
    return whole


def _without_warm_up(schedule: TaskScheduleConfig) -> TaskScheduleConfig:
    return dataclasses.replace(schedule, lr_warmup_iters=0, lr_warmup_samples=0, lr_warmup_fraction=None)


def _read(config: FinetuneConfig, tokenizer: Tokenizer, report: list[str]) -> tuple[ExampleSet, ExampleSet]:
    """The examples of training and validation; the same ones where nothing is trained."""
    task, length, ids = config.task, config.data.seq_length, pair_ids(tokenizer)
    leave_out = report.append if task.skip_malformed_lines else None
    reading = {"validation": Files(task.valid_data, "--valid-data")}
    if not task.only_evaluates:
        reading["training"] = Files(task.train_data or (), "--train-data", leave_out)
    sets = {}
    for name, files in reading.items():
        examples = config.chosen.read(files, tokenizer, length)
        sets[name] = ExampleSet(examples, length, ids)
        report.append(f"{name}: {len(examples):,} examples of {task.task} from {' '.join(files.paths)}")
    _check_names(sets["validation"].examples)
    return sets.get("training", sets["validation"]), sets["validation"]


def _check_names(examples: Sequence[Example]) -> None:
    """Raise ValueError where two examples have one name, so that a prediction would not say whose it is."""
    names: set[str] = set()
    for example in examples:
        if example.name in names:
            raise ValueError(f"--valid-data: {example.name} is there twice: give each folder and each question once")
        names.add(example.name)


def finetune(config: FinetuneConfig, observers: Sequence[Observer] = ()) -> Trainee:
    """Fine-tune as `config` says, on every rank of the launcher's world alike; errors as of `pretrain`."""
    report: list[str] = []
    with mistakes():
        tokenizer = build_tokenizer(config.tokenizer)
        training, validation = _read(config, tokenizer, report)
        iterations = iterations_to_load(config.checkpoint)
        begins = not iterations or config.checkpoint.finetune or config.task.only_evaluates
        config = resolved(config, len(training), world_size(), 0 if begins else iterations[0])
        work = Finetuning(config, training, validation, tokenizer.vocab_size, bool(iterations), report)
    flops, executed = flops_per_sample(config, _NO_VOCABULARY)
    sequences = config.chosen.sequences
    return pretrain(
        config,
        model_provider=work.provide_model,
        dataset_provider=work.provide_datasets,
        forward_step=forward_step,
        vocab_size=tokenizer.vocab_size,
        flops_per_sample=sequences * flops,
        hardware_flops_per_sample=sequences * executed,
        observers=observers,
        evaluator=work.evaluate,
    )
