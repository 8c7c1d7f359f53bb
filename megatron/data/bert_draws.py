"""Random numbers that depend on nothing but the names they are asked by, the same on every machine and for good.

NumPy keeps the bits of its bit generators for ever, but not what its `Generator` makes of them: so that a resumed run
sees the samples of the run that it resumes, bits are made into numbers here.
"""

import numpy as np

_TO_UNIT = 2.0**-53


class Draws:
    """A stream of random numbers of its own for every tuple of whole numbers: `Draws(seed, sample)`.

    The stream is that of the counter-based generator Philox, with a key that `SeedSequence` makes of the numbers, each
    taken modulo 2^64.
    """

    def __init__(self, *names: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence([name % 2**64 for name in names]))

    def bits(self, n: int) -> np.ndarray:
        """`n` random words: uint64 [n]."""
        return self._bits.random_raw(n)

    def uniform(self, n: int) -> np.ndarray:
        """`n` numbers of [0, 1): float64 [n]."""
        return (self.bits(n) >> np.uint64(11)) * _TO_UNIT

    def below(self, limit: int) -> int:
        """One of 0 .. limit-1, each as likely as the others but for 2^-53."""
        return int((self._bits.random_raw() >> 11) * _TO_UNIT * limit)

    def order(self, n: int) -> np.ndarray:
        """The numbers 0 .. n-1 in random order: int64 [n]."""
        return np.argsort(self.bits(n), kind="stable")


def hashed(keys: np.ndarray, salt: int) -> np.ndarray:
    """A random word for each of `keys`, uint64 [n], whichever others are asked for with it.

    Word k is output k+1 of the generator splitmix64 [Steele, Lea and Flood 2014] started from `salt`.
    """
    words = (keys.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
