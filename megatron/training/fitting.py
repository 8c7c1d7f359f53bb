"""Whether parallel sizes fit the ranks, and batches fit the parallel sizes; complaints name the nearest that do."""

from megatron.data.batch_sizes import BatchSchedule, RampUp
from megatron.pipeline.nearest import nearest_words


def rank_problems(tensor: int, pipeline: int, ranks: int) -> list[str]:
    """One sentence where a replica of the model does not fit a whole number of times into `ranks`."""
    if ranks % (tensor * pipeline) == 0:
        return []
    if ranks % tensor:
        wrong = f"--tensor-model-parallel-size {tensor}: it must"
        near = nearest_words(tensor, lambda n: ranks % n == 0, ranks)
    else:
        wrong = f"--pipeline-model-parallel-size {pipeline}: times --tensor-model-parallel-size {tensor} it must"
        near = nearest_words(pipeline, lambda n: ranks % (tensor * n) == 0, ranks)
    more = "; torchrun --nproc-per-node starts more" if tensor * pipeline > ranks else ""
    return [f"{wrong} divide the number of ranks, which is {ranks}{near}{more}"]


def batch_problems(total: int, micro: int, data: int, group: int) -> list[str]:
    """One sentence where a global batch of `total` samples cannot be cut into micro-batches.

    `group` is what the number of micro-batches of a rank must be a multiple of: the pipeline size with virtual stages.
    """
    if total % (micro * data) == 0:
        return []
    near = nearest_words(total, lambda n: n % (micro * data * group) == 0, total + micro * data * group)
    rule = f"it must be a multiple of --micro-batch-size {micro} times the data-parallel size {data}"
    return [f"--global-batch-size {total}: {rule}{_times(group)}{near}"]


def ramp_up_problems(schedule: BatchSchedule, micro: int, data: int, group: int) -> list[str]:
    """What is wrong with a ramp-up of the global batch, all of whose sizes must be cut so."""
    found, ramp, together = schedule.problems(), schedule.ramp_up, micro * data * group
    if not found and ramp is not None and (ramp.start % together or ramp.increment % together):
        near = f"the nearest that lead to {schedule.global_batch_size} samples are"
        found.append(
            f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}: start and increment must be "
            f"multiples of the micro batch times the data-parallel size{_times(group)}, which is {together}; "
            f"{near} {_nearest_ramp_up(schedule, ramp, together)}"
        )
    return found


def _nearest_ramp_up(schedule: BatchSchedule, ramp: RampUp, together: int) -> str:
    """Start and increment, multiples of `together`, that are least changed and lead to the global batch."""
    total = schedule.global_batch_size  # such a multiple itself
    pairs = []
    for increment in range(together, total + 1, together):
        most = (total - together) // increment
        steps = min(max(round((total - ramp.start) / increment), 0), most)
        pairs.append((total - steps * increment, increment))
    start, increment = min(pairs, key=lambda pair: abs(pair[0] - ramp.start) + abs(pair[1] - ramp.increment))
    return f"{start} and {increment}"


def _times(group: int) -> str:
    return f" times --pipeline-model-parallel-size {group}, for the virtual stages" if group > 1 else ""
