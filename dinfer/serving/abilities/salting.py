"""Requests whose keys others share only if they know the same secret: vLLM's `cache_salt`.

Whether a prompt's keys are there can be told from the time that its answer takes, and so what others have asked.
"""

import hashlib
from dataclasses import dataclass
from typing import Self

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.step.ability import Ability
from dinfer.core.step.request import Ask


@dataclass(frozen=True, slots=True)
class Salt(Ask):
    """Asks that keys be shared with requests of the same salt alone."""

    digest: str  # SHA-256, since errors and traces may show an ask

    @classmethod
    def of(cls, salt: str) -> Self:
        return cls(hashlib.sha256(salt.encode()).hexdigest())

    @property
    def keyed(self) -> tuple[tuple[int, bytes], ...]:
        return ((0, bytes.fromhex(self.digest)),)


@ABILITIES.register("salting")
class Salting(Ability):
    """Takes part in no step: a salt is in the names of pages alone."""

    answers = (Salt,)
