"""pretrain_gpt on one rank, which leaves its exit code in FOLDER/rankN; started by test_leaving: FOLDER, then flags."""

import os
import sys
from pathlib import Path

import pretrain_gpt


def main(folder: str, words: list[str]) -> None:
    """An exit that is no SystemExit, as of a signal, leaves nothing."""
    code: int | str | None = 0
    try:
        pretrain_gpt.main(words)
    except SystemExit as end:
        code = end.code
        raise
    finally:
        Path(folder, f"rank{os.environ['RANK']}").write_text(str(code))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
