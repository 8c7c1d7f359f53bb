"""The examples of a run out of the files that its flags name."""

from collections.abc import Sequence

from megatron.base.complaints import problems_of, raise_joined
from megatron.tasks.config import FinetuneConfig
from megatron.tasks.examples import Example, ExampleSet, pair_ids
from megatron.tasks.task import Files
from megatron.tokenizer import Tokenizer


def read_sets(config: FinetuneConfig, tokenizer: Tokenizer, report: list[str]) -> tuple[ExampleSet, ExampleSet]:
    """The examples of training and of validation, which are the same where nothing is trained.

    Adds sentences on what was read to `report`. Raises `ConfigError` with all that is wrong in the files.
    """
    task, length, ids = config.task, config.data.seq_length, pair_ids(tokenizer)
    reading = {"validation": Files(task.valid_data, "--valid-data")}
    if not task.only_evaluates:
        leave_out = report.append if task.skip_malformed_lines else None
        reading["training"] = Files(task.train_data or (), "--train-data", leave_out)
    sets: dict[str, ExampleSet] = {}
    problems: list[str] = []
    for name, files in reading.items():
        try:
            examples = config.chosen.read(files, tokenizer, length)
            sets[name] = ExampleSet(examples, length, ids)
            if name == "validation":
                _check_names(examples)
        except ValueError as error:
            problems += problems_of(error)
        else:
            report.append(f"{name}: {len(examples):,} examples of {task.task} from {' '.join(files.paths)}")
    raise_joined(problems)
    return sets.get("training", sets["validation"]), sets["validation"]


def _check_names(examples: Sequence[Example]) -> None:
    """Raise ValueError where two examples have one name, so that a prediction would not say whose it is."""
    names: set[str] = set()
    for example in examples:
        if example.name in names:
            raise ValueError(f"--valid-data: {example.name} is there twice: give each folder and each question once")
        names.add(example.name)
