"""`pretrain`: from a config, a model, data and a forward step to a trained model."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist

from megatron import mpu
from megatron.training.config import BatchSizes, RunConfig
from megatron.training.failure import mistakes
from megatron.training.leaving import Reason, leaving_together, words_on
from megatron.training.losses import NonFiniteLoss
from megatron.training.observers import Audience, Metrics, Observer
from megatron.training.pipeline import Batch, ForwardStep
from megatron.training.run import (
    SPLITS,
    DatasetProvider,
    Evaluator,
    ModelProvider,
    Run,
    Work,
    check_lengths,
    first_evaluated,
    sample_counts,
)
from megatron.training.saving import run_saver, save
from megatron.training.setup import World, distributed_world, world_size
from megatron.training.start import Start, description, open_outputs, started
from megatron.training.state import Trainee
from megatron.training.step import Step, evaluate, train_step
from megatron.training.throughput import Interval, memory_gib
from megatron.training.timers import Timers

# exp of a larger number is no float.
_HIGHEST_EXPONENT = 700.0


def pretrain(
    config: RunConfig,
    *,
    model_provider: ModelProvider,
    dataset_provider: DatasetProvider,
    forward_step: ForwardStep,
    vocab_size: int,
    flops_per_sample: float | None = None,
    hardware_flops_per_sample: float | None = None,
    observers: Sequence[Observer] = (),
    evaluator: Evaluator | None = None,
    loss_parts: Sequence[str] = (),
) -> Trainee:
    """Train a model as `config` says, on every rank of the launcher's world alike.

    Args:
        model_provider: makes the model, given dtype and device, when model parallelism is initialised. Whatever it
            draws from PyTorch's default generators is equal on every rank. A model may have a method `signature()`,
            a JSON dict of the choices without which its weights mean something else: kept in checkpoints and compared.
            Its persistent buffers (the statistics of a BatchNorm) go into checkpoints too: each rank's own, which come
            back at the same layout, and those of the first data and tensor rank, which all ranks get at another one.
            No two stages may have buffers of one name, but as `duplicate_parameters()` says.
            With a pipeline it makes the stages of this rank (`config.stages_of`), as `GPTModel` has them.
        dataset_provider: makes training, validation and test sets for the asked numbers of samples; None for no set.
            See `training.run.SampleDataset` for what a set must have and may have.
        forward_step: (model, micro-batch) -> sum of losses and number of counted tokens; see
            `training.pipeline.ForwardStep` for models in stages.
        vocab_size: real size of the vocabulary, without padding; no token id of the data may reach it.
        flops_per_sample: floating-point operations of one sample, forward and backward, for the log line's TFLOP/s and
            MFU, which are left out without it.
        hardware_flops_per_sample: those that are executed, with recomputation, for the log line's HFU.
        observers: watch the run beside those that the flags ask for; called on the reporting rank alone.
        evaluator: evaluates in place of the loss on `--eval-iters` batches, of the validation set when it is time for
            it, and of the test set at the end. It leaves the model as it was.
        loss_parts: names of the losses that the forward step's is made of, and gives beside it; the log line has them.

    Returns what was trained. Raises `ConfigError` (a `ValueError`) for mistakes of the user; once ranks have met, an
    error on one ends all with its message (`training.failure`).
    """
    began = time.monotonic()
    flops = (flops_per_sample, hardware_flops_per_sample)
    work = Work(model_provider, dataset_provider, forward_step, vocab_size, flops, evaluator, loss_parts)
    with mistakes():
        counts = sample_counts(config, world_size())
        datasets = work.dataset_provider(counts)
        check_lengths(datasets, counts)
    pipeline_size, virtual_size = config.pipeline.pipeline_model_parallel_size, config.layer_split().virtual_size
    with distributed_world(config.distributed, config.training.seed, pipeline_size, virtual_size) as world:
        start = started(config, work, world, datasets, counts)
        with mistakes():
            # Nothing is written before this line: whatever is wrong has been told by now.
            audience = Audience(open_outputs(config, observers) if world.reports else [])
        with _running(config, work, world, start, audience, began) as run:
            audience.on_start(description(run))
            for message in start.messages:
                audience.on_message(message)
            if run.train_iters == run.trainee.state.iteration > 0:
                audience.on_message(f"all {run.train_iters} iterations are done already: nothing is left to train")
            _train(run)
    return start.trainee


@contextlib.contextmanager
def _running(
    config: RunConfig, work: Work, world: World, start: Start, audience: Audience, began: float
) -> Iterator[Run]:
    """The run, which saves and listens to signals inside the block, and whose audience hears of its end."""
    state = start.trainee.state
    with contextlib.ExitStack() as stack:
        stack.callback(audience.on_end)
        yield Run(
            config=config,
            world=world,
            trainee=start.trainee,
            pipeline=start.pipeline,
            datasets=start.datasets,
            work=work,
            train_iters=config.iterations(world.size, state.iteration, state.consumed_samples),
            schedule=start.schedule,
            data=start.data,
            audience=audience,
            saver=stack.enter_context(run_saver(config, world, state, audience.on_message)),
            leaving=stack.enter_context(leaving_together(config, world, began)),
            timers=Timers(world.device) if config.logging.timing_log_level else None,
        )


def _train(run: Run) -> None:
    training, state, total = run.datasets[0], run.trainee.state, run.train_iters
    assert training is not None
    if run.config.training.eval_at_start:
        _evaluate(run, "validation")
    end = run.config.batch_schedule(run.world.size).consumed_after(total - state.iteration, state.consumed_samples)
    batches = run.batches(training, state.consumed_samples, end, run.config.training.ramp_up)
    interval, reason = Interval(run.workload()), None
    while state.iteration < total:
        _iterate(run, batches, interval)
        reason = run.leaving.answer()
        if reason is not None:
            break
        with interval.paused():
            _between_iterations(run)
        if _due(run.config.training.exit_interval, state.iteration) and state.iteration < total:
            reason = Reason.INTERVAL
            break
    _save(run, last=True)
    if reason is not None:
        run.audience.on_message(words_on(reason, state.iteration, run.config))
    elif state.iteration == total:
        _final_evaluations(run)
    run.trainee.optimizer.wait_for_parameters()  # whoever gets the model may read them without a forward pass


def _between_iterations(run: Run) -> None:
    """Evaluate and save where it is time to, and hear of a save in the background."""
    iteration = run.trainee.state.iteration
    if run.saver is not None:
        run.saver.poll()
    if _due(run.config.training.eval_interval, iteration):
        _evaluate(run, "validation")
    if _due(run.config.checkpoint.save_interval, iteration):
        _save(run)


def _iterate(run: Run, batches: Iterator[Batch], interval: Interval) -> None:
    """One iteration, counted and logged."""
    config, state, optimizer = run.config, run.trainee.state, run.trainee.optimizer
    sizes, lr, loss_scale = run.sizes(state.consumed_samples), run.learning_rate(), optimizer.loss_scale
    step = _step(run, batches, lr, sizes)
    interval.add(step, sizes.global_batch_size)
    state.iteration += 1
    state.consumed_samples += sizes.global_batch_size
    if step.skipped:
        state.skipped_iterations += 1
        run.audience.on_message(_skipped(state.iteration, loss_scale, optimizer.loss_scale))
    else:
        state.scheduled_samples += sizes.global_batch_size
    run.audience.on_iteration(state.iteration, run.train_iters)
    if _due(config.logging.log_interval, state.iteration):
        progress = {"iteration": state.iteration, "consumed-samples": state.consumed_samples, "lr": lr}
        memory = {"memory-GiB": _most_memory(run.world)}
        timers = {} if run.timers is None else run.timers.report(interval.steps)
        run.audience.on_log({**progress, **interval.report(), **run.loss_scaling(), **memory, **timers})


def _most_memory(world: World) -> float:
    """The most that a stage has held, in GiB; the first holds more than the last. One all-reduce over the pipeline."""
    most = torch.tensor(memory_gib(world.device), dtype=torch.float64, device=world.device)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group())
    return most.item()


def _skipped(iteration: int, before: float, after: float) -> str:
    change = "" if after == before else f", which is {after:g} from now on"
    return f"iteration {iteration} is skipped: gradients overflow at the loss scale {before:g}{change}"


def _step(run: Run, batches: Iterator[Batch], lr: float, sizes: BatchSizes) -> Step:
    iteration = run.trainee.state.iteration + 1
    try:
        return train_step(
            run.pipeline,
            run.trainee.optimizer,
            batches,
            run.work.forward_step,
            num_micro_batches=sizes.num_micro_batches,
            lr=lr,
            normalization=run.config.training.loss_normalization,
            expected_count=run.expected_count(sizes),
            check_loss=run.config.training.check_for_nan_in_loss,
            timers=run.timers,
            after_backward=run.leaving.ask,
            loss_parts=run.work.loss_parts,
        )
    except NonFiniteLoss as error:
        raise FloatingPointError(f"iteration {iteration}: {run.words_on(error)}") from None
    except FloatingPointError as error:
        raise FloatingPointError(f"iteration {iteration}: {error}") from error


def _due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _evaluate(run: Run, split: str, first: int | None = None) -> None:
    """Tell the loss on `--eval-iters` global batches of `split`, or what the evaluator finds; nothing without a set.

    They begin with the sample `first`, by default that of an evaluation after the present iteration.
    """
    run.trainee.optimizer.wait_for_parameters()
    metrics = _loss_on(run, split, first) if run.work.evaluator is None else run.work.evaluator(run, split)
    if metrics is None:
        return
    if split == "validation":
        run.trainee.state.evaluated_iteration = run.trainee.state.iteration
    run.audience.on_evaluation(split, {"iteration": run.trainee.state.iteration, **metrics})


def _loss_on(run: Run, split: str, first: int | None) -> Metrics | None:
    dataset, config, sizes = run.datasets[SPLITS.index(split)], run.config.training, run.sizes()
    if dataset is None or config.eval_iters == 0:
        return None
    if first is None:
        first = first_evaluated(run.config, run.world.size, run.trainee.state.iteration)
    loss = evaluate(
        run.pipeline,
        run.batches(dataset, first, first + config.eval_iters * sizes.global_batch_size),
        run.work.forward_step,
        num_micro_batches=sizes.num_micro_batches,
        global_batches=config.eval_iters,
        normalization=config.loss_normalization,
        loss_parts=run.work.loss_parts,
    ).means()
    # Of several losses the first is that of the tokens.
    of_tokens = loss[run.work.loss_parts[0] if run.work.loss_parts else "loss"]
    return {**loss, "perplexity": math.exp(min(of_tokens, _HIGHEST_EXPONENT))}


def _final_evaluations(run: Run) -> None:
    state, moving = run.trainee.state, run.config.training.eval_samples == "moving"
    if moving or state.evaluated_iteration != state.iteration:
        _evaluate(run, "validation", first_evaluated(run.config, run.world.size, state.iteration, at_end=True))
    _evaluate(run, "test", 0)


def _save(run: Run, *, last: bool = False) -> None:
    """Write a checkpoint below `--save`, if asked for and not written for this iteration yet."""
    if run.saver is not None:
        save(run.saver, run.trainee, run.config, run.facts(), last=last)
