"""How many candidates a step evaluates where `runtime.speculate` is auto. Host side; no token depends on it."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from dinfer.engine.runtime import AUTO_CANDIDATES

# Positions of a step that fill the tiles of a matrix product. One more takes as long as many more: with LLaDA-8B on an
# H200 a product of 128 rows takes 13.9 us, of 160 rows 19.3 us, and of 256 rows 16.8 us.
FILLED = (64, 128, 192, 256, 384, 512)
# Steps that follow a forward without one of their own, by candidates: the mean over the recipes of
# benchmarks/results/speculation-*.json for 1, 2, 4 and 8, and between them for the others. It counts as what WEIGHT
# forwards have shown; what the requests show is added to it.
EXPECTED = (0.0, 0.29, 0.37, 0.42, 0.47, 0.50, 0.53, 0.55, 0.57)
WEIGHT = 64
BELIEVED = 3  # measured steps from which on a time is believed
KEPT = 9  # of which the median is taken
WORTH = 2  # more positions than so many times those that are free never pay: no number of candidates saves so much


@dataclass(slots=True)
class CandidateChoice:
    """Tries each number of candidates for steps of a kind, and then takes the one that saves most time."""

    free: int  # positions that take as long as one more step, see `grouping.free_positions`
    times: dict[tuple[int, int, int], deque[float]] = field(default_factory=dict)  # by rows, width and candidates
    forwards: dict[int, int] = field(default_factory=dict)  # by candidates
    hits: dict[int, int] = field(default_factory=dict)

    def pick(self, rows: int, width: int) -> int:
        """The number of candidates for a step of so many rows, each with `width` positions."""
        able = self.choices(rows * width)
        for count in able:
            if len(self.times.get((rows, width, count), ())) < BELIEVED and len(able) > 1:
                return count
        return max(able, key=lambda count: self.speed(rows, width, count)) if len(able) > 1 else 0

    def choices(self, positions: int) -> list[int]:
        """The numbers of candidates that a step of so many positions without them tries: none, and what fills tiles."""
        filled = (min(size // positions - 1, AUTO_CANDIDATES) for size in FILLED if size <= WORTH * self.free)
        return sorted({0, *(count for count in filled if count > 0)})

    def speed(self, rows: int, width: int, count: int) -> float:
        """Denoise steps a second."""
        seen, hits = self.forwards.get(count, 0), self.hits.get(count, 0)
        followed = (EXPECTED[count] * WEIGHT + hits) / (WEIGHT + seen)
        return (1 + followed) / median(self.times[rows, width, count])

    def timed(self, rows: int, width: int, count: int, seconds: float) -> None:
        """Learns what a step took on the device."""
        self.times.setdefault((rows, width, count), deque(maxlen=KEPT)).append(seconds)

    def followed(self, count: int, hits: int) -> None:
        """Learns how many steps of a row followed a forward with `count` candidates."""
        self.forwards[count] = self.forwards.get(count, 0) + 1
        self.hits[count] = self.hits.get(count, 0) + hits
