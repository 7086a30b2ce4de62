"""How rotary frequencies were changed for longer texts; each is a `dinfer.core.terms.spec.Stretch`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStretch:
    """How rotary frequencies were changed for longer texts (Llama 3.1, arXiv:2407.21783).

    Those whose wavelength exceeds `length` / `low` are divided by `factor`, those below `length` / `high` kept. Between
    them the two are mixed, the kept one with the share (`length` / wavelength - `low`) / (`high` - `low`).
    """

    factor: float
    low: float
    high: float
    length: float  # positions before the change

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"rope_scaling: low_freq_factor={self.low} must be below high_freq_factor={self.high}")

    def scaled(self, frequency_X: Tensor) -> Tensor:
        """The frequencies of the pairs of a head, changed. [E / 2]"""
        turns_X = self.length * frequency_X / (2 * math.pi)  # within the positions before the change
        kept_X = ((turns_X - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency_X * (kept_X + (1 - kept_X) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's rotary frequencies: slow turns are divided by `factor`, fast ones kept, and between them a ramp.

    `fast` and `slow` are turns within `length` positions, where the ramp begins and ends.
    """

    factor: float
    fast: float
    slow: float
    length: float
    theta: float

    def scaled(self, frequency_X: Tensor) -> Tensor:
        """The frequencies of the pairs of a head, changed. [E / 2]"""
        size = 2 * len(frequency_X)

        def pair(turns: float) -> float:
            return size * math.log(self.length / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), size - 1)
        place_X = torch.arange(len(frequency_X), device=frequency_X.device, dtype=frequency_X.dtype)
        ramp_X = ((place_X - low) / (high - low or 0.001)).clamp(0, 1)
        return frequency_X * (ramp_X / self.factor + 1 - ramp_X)
