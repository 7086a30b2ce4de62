"""Rows whose keys a step computes, and which decode nothing: prompts, and rows that need more than the step's width."""

from dataclasses import replace
from typing import Self

import torch

from dinfer.step.ability import Ability, Forward, Step
from dinfer.step.canvas import Phase
from dinfer.step.parts import Parts
from dinfer.step.shape import KeysOnly, StepShape


class KeyPasses(Ability):
    """Stores the cursors of such rows after the forward, and takes them out of the step."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if shape.phase == Phase.PREFILL or shape.extra(KeysOnly) else None

    def ran(self, step: Step, run: Forward) -> None:
        final_until_B, lanes, prefill = run.window.final_until_B, step.lanes, step.shape.phase == Phase.PREFILL
        if final_until_B is None:  # the cache has none
            return
        kept_B = lanes.kept_B if run.window.kept_B is None else run.window.kept_B
        rest_B = (final_until_B < kept_B) & prefill  # a prefill continues in the next step where keys are missing
        passed = replace(
            lanes,
            live_B=lanes.live_B & (final_until_B >= 0),
            kept_B=final_until_B,
            forwards_B=lanes.forwards_B + 1,
            phase_B=torch.where(rest_B, int(Phase.PREFILL), int(Phase.WINDOW)),
        )
        step.state.canvas.store(passed)
        step.state.cache.store(lanes.slot_B, step.cache_state, passed.live_B)
        run.decodes = not prefill
        if run.decodes:
            step.narrow(lanes.live_B & ~passed.live_B)
