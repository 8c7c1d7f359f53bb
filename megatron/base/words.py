"""Small parts of sentences."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 rank`, `2 ranks`; `plural` where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def micro_batches(number: int) -> str:
    """`1 micro-batch`, `2 micro-batches`."""
    return counted(number, "micro-batch", "micro-batches")
