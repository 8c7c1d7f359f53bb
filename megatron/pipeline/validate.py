"""A checker of schedules and programs that shares no code with what makes them: it knows the rules of a pipeline only.

Each function returns sentences, none where all is well.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron.pipeline.actions import Action, Exchange, Message, Program, Schedule

_Place = tuple[int, int]  # pipeline rank, chunk


def schedule_problems(schedule: Schedule) -> list[str]:
    """What keeps a schedule from being run: a sentence for each rank whose list is wrong, else for each that is stuck.

    Each (micro-batch, chunk) must go forward once and then, unless it is `forward_only`, backward once, and the ranks
    together must get to the end of their lists when each pass waits for what it needs from others.
    """
    if len(schedule.actions) != schedule.pipeline_size:
        return [f"there are lists of {len(schedule.actions)} ranks, not of {schedule.pipeline_size}"]
    found = [problem for rank in range(schedule.pipeline_size) for problem in _list_problems(schedule, rank)]
    return found or _endless_waits(schedule)


def peak_in_flight(actions: Iterable[Action]) -> int:
    """Most forward passes of one rank, each of one chunk, that wait for their backward pass at one time."""
    held = peak = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        peak = max(peak, held)
    return peak


def program_problems(schedule: Schedule, programs: Sequence[Program]) -> list[str]:
    """What is wrong with the programs of all ranks for a schedule that is right by itself.

    A program must run its rank's actions in their order; each input must be received before it is needed and each
    output sent after it is made, once, and nothing else; for each ordered pair of ranks sends and receives must have
    the same order; and the ranks must get to the end even if every exchange blocks: a rank leaves it only when each of
    its messages has met the other rank standing at the exchange which that message has there.
    """
    if len(programs) != schedule.pipeline_size:
        return [f"there are programs of {len(programs)} ranks, not of {schedule.pipeline_size}"]
    found = [problem for rank, program in enumerate(programs) for problem in _own_problems(schedule, rank, program)]
    return found or _pair_problems(programs) or _deadlocks(programs)


def _list_problems(schedule: Schedule, rank: int) -> list[str]:
    """The first thing that is wrong with the list of one rank, seen alone."""
    v, m = schedule.virtual_size, schedule.num_micro_batches
    passes = bytearray(v * m)  # by chunk and micro-batch: 1 after the forward, 2 after the backward pass
    complete = 1 if schedule.forward_only else 2
    for action in schedule.actions[rank]:
        kind, micro_batch, chunk = action
        if not (0 <= micro_batch < m and 0 <= chunk < v):
            return [f"rank {rank}: the {action} is outside {m} micro-batches and {v} chunks"]
        at = chunk * m + micro_batch
        if passes[at] != (0 if kind == "forward" else 1) or passes[at] == complete:
            return [f"rank {rank}: the {action} comes once too often, or before its forward pass"]
        passes[at] += 1
    for at, count in enumerate(passes):
        if count != complete:
            absent = "backward" if count else "forward"
            return [f"rank {rank}: there is no {absent} of micro-batch {at % m} in chunk {at // m}"]
    return []


def _source_of_forward(schedule: Schedule, rank: int, chunk: int) -> _Place | None:
    """Where the activations come from that enter here; None at the start of the model."""
    if rank > 0:
        return rank - 1, chunk
    return (schedule.pipeline_size - 1, chunk - 1) if chunk > 0 else None


def _source_of_backward(schedule: Schedule, rank: int, chunk: int) -> _Place | None:
    """Where the gradients come from that enter here, and the activations go that leave; None at the model's end."""
    if rank < schedule.pipeline_size - 1:
        return rank + 1, chunk
    return (0, chunk + 1) if chunk < schedule.virtual_size - 1 else None


def _endless_waits(schedule: Schedule) -> list[str]:
    """Run the lists with messages that need nobody to receive them; a sentence for each rank that stops half-way."""
    p, m, size = schedule.pipeline_size, schedule.num_micro_batches, schedule.virtual_size * schedule.num_micro_batches
    done = {"forward": [bytearray(size) for _ in range(p)], "backward": [bytearray(size) for _ in range(p)]}
    places = [(rank, chunk) for rank in range(p) for chunk in range(schedule.virtual_size)]
    sources = {
        "forward": {place: _source_of_forward(schedule, *place) for place in places},
        "backward": {place: _source_of_backward(schedule, *place) for place in places},
    }
    at, moved = [0] * p, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions):
                kind, micro_batch, chunk = actions[at[rank]]
                source = sources[kind][rank, chunk]
                if source is not None and not done[kind][source[0]][source[1] * m + micro_batch]:
                    break
                done[kind][rank][chunk * m + micro_batch] = moved = True
                at[rank] += 1
    return [
        f"rank {rank} waits for ever for the input of the {actions[at[rank]]}"
        for rank, actions in enumerate(schedule.actions)
        if at[rank] < len(actions)
    ]


def _own_problems(schedule: Schedule, rank: int, program: Program) -> list[str]:
    """The first thing that is wrong with one program, seen alone."""
    if tuple(i for i in program if isinstance(i, Action)) != schedule.actions[rank]:
        return [f"rank {rank}: the program does not run the actions of the schedule in their order"]
    chunks = range(schedule.virtual_size)
    ahead = [_source_of_forward(schedule, rank, chunk) for chunk in chunks]
    behind = [_source_of_backward(schedule, rank, chunk) for chunk in chunks]
    arrived: set[tuple[object, ...]] = set()  # messages, and plain tuples that equal them, which are faster to make
    owed: set[tuple[object, ...]] = set()
    for instruction in program:
        if isinstance(instruction, Exchange):
            wrong = [m for m in instruction.sends if m not in owed] + [m for m in instruction.receives if m in arrived]
            if wrong:
                return [f"rank {rank}: the {wrong[0]} has not been made, or is sent or received twice"]
            owed.difference_update(instruction.sends)
            arrived.update(instruction.receives)
            continue
        kind, micro_batch, chunk = instruction
        source, target = (ahead, behind) if kind == "forward" else (behind, ahead)
        payload = "activation" if kind == "forward" else "gradient"
        if (place := source[chunk]) is not None:
            needed = (payload, micro_batch, *place, rank, chunk)
            if needed not in arrived:
                return [f"rank {rank}: what the {instruction} needs is not received before it"]
            arrived.remove(needed)
        if (place := target[chunk]) is not None:
            owed.add((payload, micro_batch, rank, chunk, *place))
    if owed or arrived:
        return [f"rank {rank}: {len(owed)} outputs are never sent, {len(arrived)} messages are received for nothing"]
    return []


def _pair_problems(programs: Sequence[Program]) -> list[str]:
    """For each ordered pair of ranks the first message that is sent at another place in line than it is received."""
    sent: dict[_Place, list[Message]] = defaultdict(list)
    received: dict[_Place, list[Message]] = defaultdict(list)
    for program in programs:
        for instruction in program:
            if isinstance(instruction, Exchange):
                for message in instruction.sends:
                    sent[message.source, message.destination].append(message)
                for message in instruction.receives:
                    received[message.source, message.destination].append(message)
    return [
        f"rank {pair[0]} sends to rank {pair[1]} in another order than is received there: the {first}"
        for pair in sent
        for first in [m for m, other in zip(sent[pair], received[pair], strict=True) if m != other][:1]
    ]


def _deadlocks(programs: Sequence[Program]) -> list[str]:
    """Run the programs with exchanges that block; a sentence for each rank that never gets out of one."""
    at, missing = [0] * len(programs), [0] * len(programs)  # messages that keep a rank in its exchange
    half: set[Message] = set()  # messages of which one rank stands at its exchange
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(programs[rank]) and not missing[rank]:
            instruction = programs[rank][at[rank]]
            at[rank] += 1
            if isinstance(instruction, Action):
                continue
            for message in (*instruction.sends, *instruction.receives):
                if message not in half:
                    half.add(message)
                    missing[rank] += 1
                    continue
                half.remove(message)
                other = message.source if message.destination == rank else message.destination
                missing[other] -= 1
                if not missing[other]:
                    runnable.append(other)
    return [f"rank {rank} never gets out of exchange {at[rank] - 1}" for rank, n in enumerate(missing) if n]
