"""Average the scores of several fine-tuned models: `python tools/ensemble_race.py SEED1.jsonl SEED2.jsonl ...`.

The files are those of `python -m megatron.tasks.main --predictions-file`, of the same questions. Prints the accuracy of
each and that of the ensemble, which chooses the option with the highest mean score. For MNLI and QQP as well.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.base.files import file_problem
from megatron.tasks.predictions import count_correct, count_words, ensemble, read_predictions, write_predictions
from megatron.training.failure import exit_code


def average(files: Sequence[str], output: str | None) -> None:
    """Print the accuracies, and write the mean scores to `output`. ValueError where it, or a file, is none."""
    if output is not None and (why := file_problem(output)):
        raise ValueError(f"--output {output}: {why}")
    several = [read_predictions(file) for file in files]
    together = ensemble(several)
    for file, predictions in zip(files, several, strict=True):
        print(f"{file}: {count_words(count_correct(predictions))}")
    print(f"ensemble of {len(files)}: {count_words(count_correct(together))}")
    if output is not None:
        write_predictions(output, together)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags and average; the exit code."""
    parser = argparse.ArgumentParser(description="Average the scores of several fine-tuned models.")
    parser.add_argument("files", nargs="+", help="files of --predictions-file, one for each model")
    parser.add_argument("--output", help="file for the mean scores, of the same form")
    flags = parser.parse_args(argv)
    return exit_code(lambda: average(flags.files, flags.output))


if __name__ == "__main__":
    sys.exit(main())
