"""Fine-tuning: `pretrain` over epochs of examples, with an evaluation of all of them after each."""

from collections.abc import Sequence

import torch

from megatron import mpu
from megatron.checkpointing import iterations_to_load
from megatron.model import BertEncoder, build_bert
from megatron.tasks.best import Best
from megatron.tasks.config import FinetuneConfig
from megatron.tasks.epochs import Epochs
from megatron.tasks.examples import ExampleSet
from megatron.tasks.predictions import count_correct, count_words
from megatron.tasks.pretrained import load_encoder
from megatron.tasks.reading import read_sets
from megatron.tasks.resolving import check_kind, resolved
from megatron.tasks.scoring import forward_step, predictions_of, score
from megatron.tokenizer import build_tokenizer
from megatron.training.failure import mistakes
from megatron.training.flops import flops_per_sample
from megatron.training.loop import pretrain
from megatron.training.observers import Metrics, Observer
from megatron.training.run import Run, SampleCounts
from megatron.training.setup import world_size
from megatron.training.state import Trainee

_NO_LOGITS = 0  # of a vocabulary, which an encoder makes none of


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
        self._best = Best(config, len(validation))
        self._report = [*report, *self._best.notes]

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
            stages=config.stages_of(mpu.get_pipeline_model_parallel_rank(), _NO_LOGITS),
            **config.chosen.options,
        )
        if pretrained is not None and not self._loads:
            with mistakes():
                self._report += load_encoder(model, pretrained)
        elif not self._loads:
            self._report.append("the whole model begins anew, for there is no --pretrained-checkpoint")
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
        what = self._config.checkpoint.load if self._config.task.only_evaluates else f"epoch {epoch}"
        run.audience.on_message(f"{what}: {count_words(counts)}")
        self._best.offer(run, epoch, predictions)
        groups = {f"{group}-{name}": n for group, c in counts.items() for name, n in c._asdict().items()}
        return {"epoch": epoch, "loss": loss, "accuracy": counts["all"].accuracy, **groups}


def finetune(config: FinetuneConfig, observers: Sequence[Observer] = ()) -> Trainee:
    """Fine-tune as `config` says, on every rank of the launcher's world alike; errors as of `pretrain`."""
    report: list[str] = []
    with mistakes():
        tokenizer = build_tokenizer(config.tokenizer)
        config.model.vocabulary_rows(tokenizer.vocab_size)  # that there are rows enough
        training, validation = read_sets(config, tokenizer, report)
        iterations = iterations_to_load(config.checkpoint)
        if iterations:
            check_kind(config, iterations[0])
        begins = config.checkpoint.finetune or config.task.only_evaluates
        config = resolved(config, len(training), world_size(), iterations[0] if iterations and not begins else 0)
        work = Finetuning(config, training, validation, tokenizer.vocab_size, bool(iterations), report)
    flops, executed = flops_per_sample(config, _NO_LOGITS)
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
