"""verl's rollout worker over a dinfer pipeline, driven by a stub of verl's trainer.

    python examples/verl_rollout.py

The worker has what verl calls (`BaseRollout` of 1dda039b): `generate_sequences`, `update_weights` with a generator of
names and tensors, `release` and `resume`. Its batches are laid out as verl's are: prompts padded on the left, responses
on the right, and beside them the log-probabilities that importance weights need, and the step maps that a replay needs.
"""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import dinfer
from dinfer.core.pipeline import Pipeline
from dinfer.demo.problems import generate

GROUP = 4


@dataclass
class DataProto:
    """The part of verl's batch that passes between trainer and worker."""

    batch: dict[str, Tensor]
    meta_info: dict[str, Any] = field(default_factory=dict)


class DinferRollout:
    """A rollout worker (verl's `BaseRollout`)."""

    def __init__(self, pipe: Pipeline, response_length: int, **sampling: float) -> None:
        self.pipe, self.response_length, self.sampling = pipe, response_length, sampling

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A response to each row. The trainer has repeated the prompts of a group."""
        ids_NP, mask_NP = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
        rows = [row[mask].tolist() for row, mask in zip(ids_NP, mask_NP, strict=True)]
        step, count = prompts.meta_info["global_steps"], len(rows)
        made = self.pipe.rollout(
            rows, max_new_tokens=self.response_length, seed=[step * count + n for n in range(count)], **self.sampling
        )
        answers_NA, width = made.answer_ids, made.answer_ids.shape[1]
        mask_NA = torch.arange(width) < made.stops[:, None]
        attention_NT = torch.cat((mask_NP, mask_NA), 1).long()
        assert made.logps is not None and made.sampled_logps is not None and made.steps is not None
        return DataProto(
            {
                "prompts": ids_NP, "responses": answers_NA, "response_mask": mask_NA.long(),
                "input_ids": torch.cat((ids_NP, answers_NA), 1), "attention_mask": attention_NT,
                "position_ids": (attention_NT.cumsum(1) - 1).clamp_min(0), "step_map": made.steps,
                "rollout_log_probs": made.sampled_logps.where(~made.sampled_logps.isnan(), made.logps),
            },
            {"weight_version": self.pipe.weights.version, "exact": made.exact},
        )  # fmt: skip

    async def update_weights(
        self, weights: Generator[tuple[str, Tensor], None, None], wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Takes tensors under their names in a checkpoint, all of them or some."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r} is not taken here: use named_tensors")
        with self.pipe.updating() as into:
            into.load_all(weights)

    async def release(self) -> None:
        """Gives keys and weights back, while the trainer needs the memory."""
        self.pipe.weights.sleep(1)

    async def resume(self, tags: list[str]) -> None:
        """Takes memory again, in the stages in which verl asks for it."""
        self.pipe.weights.wake([{"kv_cache": "keys"}.get(tag, tag) for tag in tags])


async def trainer(worker: DinferRollout, rounds: int) -> None:
    """What verl's trainer does, without the training: samples, sleep, new weights, and samples again."""
    pipe, eos = worker.pipe, worker.pipe.model.spec.eos_id
    for step in range(rounds):
        problems = generate("train", count=2, seed=step)
        rows = [pipe.encode(problem.question) for problem in problems for _ in range(GROUP)]
        width = max(map(len, rows))
        ids_NP = torch.tensor([[eos] * (width - len(row)) + row for row in rows])
        mask_NP = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        batch = DataProto({"input_ids": ids_NP, "attention_mask": mask_NP}, {"global_steps": step})
        made = worker.generate_sequences(batch)
        responses = {tuple(row.tolist()) for row in made.batch["responses"]}
        print(
            f"step {step}: {len(responses)} of {len(rows)} responses differ, version {made.meta_info['weight_version']}"
        )
        await worker.release()
        await worker.resume(["weights"])
        tensors = pipe.weights.tensors()  # times 1.001 stands for what training has made of them
        await worker.update_weights((name, 1.001 * tensor) for name, tensor in tensors.items())
        await worker.resume(["kv_cache"])


def main() -> None:
    pipe = dinfer.load("tiny", device="cpu")
    asyncio.run(trainer(DinferRollout(pipe, 64, temperature=1.0, threshold=0.6), rounds=2))


if __name__ == "__main__":
    main()
