"""TRL's GRPOTrainer trains the model in the box: dinfer samples, and its estimators give the log-probabilities.

    pip install trl
    python examples/trl_grpo.py --steps 2

`rollout_func` is where TRL asks for samples. The trainer's own log-probabilities are those of a model that writes from
left to right, so they are replaced by an estimator of diffusion models. Trainer and engine share their weights, and
nothing is sent.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import dinfer
from dinfer.core.pipeline import Pipeline
from dinfer.demo.problems import extract_answer, generate
from dinfer.lab.likelihood import Samples, combine, logps, passes

GROUP = 4


class DiffusionConfig(PretrainedConfig):
    model_type = "dinfer"


class DiffusionModel(PreTrainedModel):
    """The network of a pipeline, as TRL takes a model."""

    config_class = DiffusionConfig

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(DiffusionConfig())
        self.network, self.pipe = pipe.model.requires_grad_(True), pipe
        self.generation_config = GenerationConfig()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.network.score(input_ids)


class DiffusionTrainer(GRPOTrainer):
    """GRPO with the log-probabilities of d1: the whole answer masked, a share of the prompt too."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *_, **more):
        network, begin = self.accelerator.unwrap_model(model).network, input_ids.shape[1] - logits_to_keep
        lengths = attention_mask.sum(1).tolist()
        prompts = [int(mask[:begin].sum()) for mask in attention_mask]
        pairs = [  # TRL pads prompts on the left, and answers on the right
            (row[begin - prompt : begin].tolist(), row[begin : begin + length - prompt].tolist())
            for row, prompt, length in zip(input_ids, prompts, lengths, strict=True)
        ]
        drawn = passes("diffu_grpo", network.spec, Samples.of(pairs), seed=self.state.global_step)
        found = combine(drawn, logps(network, drawn, grad=torch.is_grad_enabled())).per_token.sum(0)
        token_NA = torch.nn.functional.pad(found.float(), (0, logits_to_keep - found.shape[1]))
        return token_NA, -token_NA.detach(), None  # one draw of the entropy, which TRL only logs


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, object]:
    """What TRL asks for: a sample for each prompt, and each prompt of a group comes anew."""
    pipe = trainer.accelerator.unwrap_model(trainer.model).pipe
    seeds = [1000 * trainer.state.global_step + index for index in range(len(prompts))]
    with pipe.updating() as into:
        into.changed()  # the optimizer has written to the weights
    made = pipe.rollout(prompts, max_new_tokens=64, seed=seeds, temperature=1.0, threshold=0.6)
    return {**made.to_trl(), "forwards": made.forwards.tolist()}


def right(completions: list[str], answer: list[str], forwards: list[int], **_: object) -> list[float]:
    """The right answer in few forwards is rewarded."""
    return [
        float(extract_answer(text) == wanted) * (1.5 - count / 48)
        for text, wanted, count in zip(completions, answer, forwards, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2, help="of each step")
    given = parser.parse_args()
    pipe = dinfer.load("tiny", device="cpu")
    problems = generate("train", count=given.steps * given.prompts, seed=0, families=["turns", "walks", "sharing"])
    data = Dataset.from_list([{"prompt": one.question, "answer": one.answer} for one in problems])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=given.steps, per_device_train_batch_size=given.prompts * GROUP,
            num_generations=GROUP, max_completion_length=64, learning_rate=1e-5, logging_steps=1, report_to=[],
            use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = DiffusionTrainer(
            DiffusionModel(pipe), right, args=config, train_dataset=data, processing_class=pipe.tokenizer,
            rollout_func=rollout,
        )  # fmt: skip
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, loss {entry['loss']:.4f}")
    print(f"weights of version {pipe.weights.version}")


if __name__ == "__main__":
    main()
