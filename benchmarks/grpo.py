"""GRPO of the model in the box: the right answer in few forwards is rewarded. One process, on a CPU.

    python -m benchmarks.grpo train --seed 0 --folder RUN
    python -m benchmarks.grpo compare --out benchmarks/results/grpo-loops-cpu.json
    python -m benchmarks.grpo table RUN ... --out benchmarks/results/grpo-cpu.json

`train` goes on where it stopped, until --seconds are over or all rounds are done. Before the first round, every few
rounds, and after the last, unseen problems are answered greedily. `compare` runs whole rounds with dinfer's sampler
and with a plain loop over the same network, one after the other, from the same weights.

The defaults are what a sweep of 22 settings found: `diffu_grpo`, which scores all tokens on an empty canvas, and worse
samples at a tenth, since log-probabilities of what is punished fall without end. `tracerl` scores each token on the
canvas of the step that wrote it: it raised confidence where tokens do not fit together, and lost right answers. There
is one update a round (--splits: few), so that the policy that is updated is the one that drew: their ratio is 1, and
nothing needs to be clipped.

Shape suffixes: N samples, P their prompt, A positions of an answer, T both, V vocabulary, M passes, X scored tokens.
"""

from __future__ import annotations

import copy
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dinfer
from benchmarks.clock import lap
from benchmarks.provenance import command_line, provenance, save
from dinfer.demo.problems import Problem, generate, is_correct, stream
from dinfer.lab.likelihood import Passes, logps, passes
from dinfer.rollouts.rollouts import Rollouts

FAMILIES = ("ages", "chains", "sharing", "travel", "turns", "walks")  # whose answers fit into two blocks
BLOCK, ROWS = 32, 32
SLOW = 24.0  # forwards that earn nothing beside the right answer


def setting_of(given: Namespace) -> dict[str, Any]:
    """What decides a run's figures."""
    return {key: value for key, value in vars(given).items() if key not in ("folder", "seconds", "out", "runs", "task")}


def loaded(threshold: float) -> Any:
    pipe = dinfer.load(
        "tiny", device="cpu", iteration={"name": "blockwise", "block": BLOCK}, cache="dual",
        decoder={"name": "threshold", "threshold": threshold}, runtime=dinfer.Runtime(rows=64),
    )  # fmt: skip
    return pipe


def policy_of(pipe: Any, given: Namespace) -> Any:
    """The network that is trained: the engine's own, or with --peft a copy of it in an adapter of peft."""
    if not given.peft:
        return pipe.model.requires_grad_(True)
    import peft

    torch.manual_seed(given.seed)  # peft draws A
    config = peft.LoraConfig(r=given.peft, lora_alpha=2 * given.peft, target_modules=["qkv", "out", "gate_up", "down"])
    return peft.get_peft_model(copy.deepcopy(pipe.model), config)


def trained(policy: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in policy.named_parameters() if tensor.requires_grad}


def send(pipe: Any, policy: Any) -> None:
    """The engine takes what an update has written: of an adapter its own tensors alone, which it merges in place."""
    with pipe.updating() as into:
        if policy is pipe.model:
            into.changed()
        else:
            import peft

            into.lora(peft.get_peft_model_state_dict(policy), policy.peft_config["default"].to_dict())


def reference_of(policy: Any, given: Namespace) -> Any:
    """What gives the log-probabilities of the first policy: a copy of it, or the policy without its adapter."""
    if not given.kl:
        return None
    first = policy if given.peft else copy.deepcopy(policy).requires_grad_(False)

    def scored(drawn: Passes) -> Tensor:
        with policy.disable_adapter() if given.peft else nullcontext():
            return logps(first, drawn, batch_tokens=1 << 14, grad=False)

    return scored


def plain(pipe: Any, prompts: list[list[int]], seed: int, given: Namespace) -> Rollouts:
    """The loop that trainers run: a group at a time, the whole canvas in every forward, in eager torch."""
    spec, generator, found = pipe.model.spec, torch.Generator().manual_seed(seed), list[Rollouts]()
    for prompt in prompts:
        tokens_NT = torch.tensor([prompt + [spec.mask] * given.new] * given.group)
        step_NA, forwards_N, stopped_N = (
            torch.full((given.group, given.new), -1),
            torch.zeros(given.group).long(),
            torch.zeros(given.group) > 0,
        )
        for begin in range(len(prompt), len(prompt) + given.new, BLOCK):
            block = slice(begin, begin + BLOCK)
            while bool((open_NT := tokens_NT[:, block] == spec.mask)[~stopped_N].any()):
                with torch.inference_mode():
                    logits_NTV = pipe.model.score(tokens_NT)[:, block]
                noise = -torch.rand(logits_NTV.shape, generator=generator).double().clamp_min(1e-20).log()
                token_NB = (logits_NTV.double() / given.temperature - noise.log()).argmax(-1)
                chance_NB = logits_NTV.softmax(-1).gather(-1, token_NB[..., None])[..., 0].masked_fill(~open_NT, -1)
                best_NB = torch.zeros_like(open_NT).scatter(1, chance_NB.argmax(1, keepdim=True), True)
                takes_NB = open_NT & ((chance_NB >= given.threshold) | best_NB) & ~stopped_N[:, None]
                tokens_NT[:, block] = torch.where(takes_NB, token_NB, tokens_NT[:, block])
                places = slice(begin - len(prompt), begin - len(prompt) + BLOCK)
                step_NA[:, places] = torch.where(takes_NB, forwards_N[:, None], step_NA[:, places])
                forwards_N += ~stopped_N & open_NT.any(-1)
            stopped_N = torch.isin(tokens_NT[:, len(prompt) :], torch.tensor(spec.stop_ids)).any(-1) & given.stops
        found.append(as_rollouts(tokens_NT, step_NA, forwards_N, len(prompt), pipe))
    return Rollouts.cat(found)


def as_rollouts(tokens_NT: Tensor, step_NA: Tensor, forwards_N: Tensor, prompt: int, pipe: Any) -> Rollouts:
    spec, (count, new) = pipe.model.spec, step_NA.shape
    answer_NA = tokens_NT[:, prompt:].masked_fill(step_NA < 0, spec.eos_id)
    ends_NA = torch.isin(answer_NA, torch.tensor(spec.stop_ids)) & (step_NA >= 0)
    width_N = torch.full((count,), new)
    stop_N = torch.where(ends_NA.any(1), ends_NA.long().argmax(1) + 1, new)
    return Rollouts(
        prompt_ids=tokens_NT[:, :prompt], prompt_lengths=torch.full((count,), prompt), answer_ids=answer_NA,
        lengths=(step_NA >= 0).sum(1), widths=width_N, stops=stop_N, stopped=ends_NA.any(1),
        aborted=torch.zeros(count) > 0, forwards=forwards_N,
        seeds=torch.full((count,), -1), versions=torch.zeros(count, new).long(), steps=step_NA.int(),
        first_steps=step_NA.int(), logps=None, sampled_logps=None, events=None, event_logps=None, block=BLOCK,
        origin="prompt", eos_id=spec.eos_id, attention=None, inexact="",
    )  # fmt: skip


def sampled(pipe: Any, problems: list[Problem], seed: int, given: Namespace, sampler: str) -> Rollouts:
    prompts = [pipe.encode(problem.question) for problem in problems]
    if sampler == "plain":
        return plain(pipe, prompts, seed, given)
    made: Rollouts = pipe.rollout(
        prompts, n=given.group, max_new_tokens=given.new, seed=seed, record="steps", temperature=given.temperature,
        threshold=given.explore,
    )  # fmt: skip
    return made


def rewarded(pipe: Any, problems: list[Problem], made: Rollouts, given: Namespace) -> tuple[Tensor, Tensor]:
    """Rewards, and which answers are right. [prompts, group] each"""
    texts = [pipe.decode(ids) for ids in made.to_trl()["completion_ids"]]
    right = torch.tensor([is_correct(problems[n // given.group], text) for n, text in enumerate(texts)]).float()
    quick = (1 - made.forwards / SLOW).clamp(0, 1)
    return (right * (1 + given.quick * quick)).view(-1, given.group), right.view(-1, given.group)


def advantages(rewards: Tensor, given: Namespace) -> Tensor:
    """How much better each sample is than its group. Worse ones count --negative times. [N]"""
    # Not divided by the deviation unless asked: where all are right, a forward would count as much as an answer.
    advantage = rewards - rewards.mean(1, keepdim=True)
    if given.std:
        advantage = advantage / (rewards.std(1, keepdim=True) + 1e-2)
    return torch.where(advantage > 0, advantage, given.negative * advantage).flatten()


def updated(
    policy: Any, made: Rollouts, rewards: Tensor, optimizer: Any, given: Namespace, seed: int, reference: Any = None
) -> None:
    """Steps of the optimizer by all samples whose groups differ; each counts by the mean of its tokens."""
    advantage_N = advantages(rewards, given)
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(seed))
    chosen: list[int] = order[advantage_N[order].abs() > 1e-6].tolist()
    for split in range(given.splits):
        part = chosen[split :: given.splits]
        optimizer.zero_grad()
        for begin in range(0, len(part), ROWS):
            rows = part[begin : begin + ROWS]
            drawn = passes(given.estimator, policy.spec, made[rows].samples(), seed=seed, **given.options)
            drawn = some(drawn, given.passes, seed)
            loss = loss_of(policy, drawn, made[rows].stops, advantage_N[rows], reference, given)
            (loss / len(part)).backward()
        if part:
            torch.nn.utils.clip_grad_norm_(trained(policy).values(), 1.0)
            optimizer.step()


def loss_of(
    policy: Any, drawn: Passes, stops_N: Tensor, advantage_N: Tensor, reference: Any, given: Namespace
) -> Tensor:
    """The sum over samples of what their tokens lose on average, and --kl times their distance to the reference.

    Both policies see the same passes. The distance is k3 (Schulman 2020, as GRPO has it), which is never negative.
    """
    logp_X, of_X = logps(policy, drawn, batch_tokens=1 << 14), drawn.sequence_M[drawn.pass_X]
    # Not what stands behind the stop token.
    weight_X = (drawn.place_X - drawn.prompt_N[of_X] < stops_N[of_X]) * drawn.weight_X.float()
    share_X = weight_X / torch.zeros(len(stops_N)).index_add(0, of_X, weight_X).clamp_min(1e-9)[of_X]
    loss = -(logp_X * share_X * advantage_N[of_X]).sum()
    if reference is not None:
        apart_X = reference(drawn) - logp_X
        loss = loss + given.kl * ((apart_X.exp() - apart_X - 1) * share_X).sum()
    return loss


def some(drawn: Passes, most: int, seed: int) -> Passes:
    """At most so many passes of each sample, by chance."""
    if not most:
        return drawn
    order_M = torch.randperm(len(drawn.sequence_M), generator=torch.Generator().manual_seed(seed))
    kept_M = torch.zeros(len(order_M), dtype=torch.bool)
    for n in range(len(drawn.prompt_N)):
        kept_M[order_M[drawn.sequence_M[order_M] == n][:most]] = True
    kept_X, place_M = kept_M[drawn.pass_X], kept_M.cumsum(0) - 1
    return replace(
        drawn, sequence_M=drawn.sequence_M[kept_M], sample_M=drawn.sample_M[kept_M], masked_MT=drawn.masked_MT[kept_M],
        pass_X=place_M[drawn.pass_X[kept_X]], place_X=drawn.place_X[kept_X], weight_X=drawn.weight_X[kept_X],
    )  # fmt: skip


def judged(pipe: Any, given: Namespace, count: int, seed: int) -> dict[str, float]:
    """Greedy answers to unseen problems."""
    problems = generate("heldout", count=count, seed=seed, families=FAMILIES)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=given.new)
    right = [is_correct(problem, result.text) for problem, result in zip(problems, results, strict=True)]
    tokens, forwards = (sum(getattr(result.counts, name) for result in results) for name in ("tokens", "forwards"))
    return {
        "problems": count, "accuracy": sum(right) / count, "tokens_a_forward": tokens / forwards,
        "forwards_an_answer": forwards / count,
    }  # fmt: skip


def problems_of(given: Namespace, first: int) -> Iterator[list[Problem]]:
    """The prompts of each round from one on."""
    source = stream("train", 1000 + given.seed, FAMILIES)
    groups = iter(lambda: [*islice(source, given.prompts)], [])
    return islice(groups, first, None)


def train(given: Namespace) -> None:
    """Rounds until the time is over, each saved."""
    began, folder = time.monotonic(), given.folder
    folder.mkdir(parents=True, exist_ok=True)
    notes, pipe = folder / "run.json", loaded(given.threshold)
    report: dict[str, Any] = json.loads(notes.read_text()) if notes.is_file() else {
        "setting": setting_of(given), **provenance(torch.device("cpu")), "rounds": [], "curve": [],
    }  # fmt: skip
    rounds, curve = report["rounds"], report["curve"]
    policy = policy_of(pipe, given)
    names, reference = trained(policy), reference_of(policy, given)
    optimizer = torch.optim.AdamW(names.values(), lr=given.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def note() -> None:
        notes.write_text(json.dumps(report, indent=1))

    if rounds:
        restore(folder, names, optimizer)
        send(pipe, policy)
    elif not curve:
        curve.append({"rounds": 0, **judged(pipe, given, given.answers, given.unseen)})
        note()
    for problems in problems_of(given, len(rounds)):
        if len(rounds) >= given.rounds or time.monotonic() - began > given.seconds:
            break
        optimizer.param_groups[0]["lr"] = given.lr * rate_of(len(rounds), given)
        rounds.append(one_round(pipe, policy, problems, optimizer, given, len(rounds), reference=reference))
        if len(rounds) % given.every == 0 and len(rounds) < given.rounds:
            curve.append({"rounds": len(rounds), **judged(pipe, given, given.answers, given.unseen)})
        keep(folder, names, optimizer)
        note()
        print(json.dumps(rounds[-1]), flush=True)
    if curve[-1]["rounds"] != len(rounds):
        curve.append({"rounds": len(rounds), **judged(pipe, given, given.answers, given.unseen)})
    note()
    if given.last and "last" not in report:
        report["last"] = judged(pipe, given, given.last, given.unseen + 1)
        note()
    print(json.dumps([curve[0], curve[-1], report.get("last")]), flush=True)


def rate_of(number: int, given: Namespace) -> float:
    """The learning rate of a round as a share of the highest: it rises for --warm rounds, and falls to a tenth."""
    return min(1.0, (number + 1) / (given.warm + 1)) * max(1 - 0.9 * number / given.rounds, 0.1)


def one_round(
    pipe: Any, policy: Any, problems: list[Problem], optimizer: Any, given: Namespace, number: int, *,
    sampler: str = "engine", reference: Any = None,
) -> dict[str, float]:  # fmt: skip
    """Samples, rewards, an update, and its weights sent to the engine. CPU seconds of both parts."""
    seed = 10_000 * given.seed + number
    made, sampling, _ = lap(lambda: sampled(pipe, problems, seed, given, sampler), cpu=True)

    def update() -> tuple[Tensor, Tensor]:
        rewards, right = rewarded(pipe, problems, made, given)
        updated(policy, made, rewards, optimizer, given, seed, reference)
        send(pipe, policy)
        return rewards, right

    (rewards, right), updating, _ = lap(update, cpu=True)
    return {
        "right": float(right.mean()), "reward": float(rewards.mean()), "forwards": float(made.forwards.float().mean()),
        "sampling_cpu_s": round(sampling, 2), "update_cpu_s": round(updating, 2),
    }  # fmt: skip


def keep(folder: Path, names: dict[str, Tensor], optimizer: Any) -> None:
    """Weights and moments, where the next piece of the run finds them."""
    held = {f"w.{name}": tensor.detach() for name, tensor in names.items()}
    for name, tensor in names.items():
        held |= {f"{key}.{name}": optimizer.state[tensor][key].clone() for key in ("exp_avg", "exp_avg_sq", "step")
                 if tensor in optimizer.state}  # fmt: skip
    save_file({name: tensor.contiguous().clone() for name, tensor in held.items()}, folder / "next.safetensors")
    (folder / "next.safetensors").replace(folder / "state.safetensors")


def restore(folder: Path, names: dict[str, Tensor], optimizer: Any) -> None:
    held = load_file(folder / "state.safetensors")
    with torch.no_grad():
        for name, tensor in names.items():
            tensor.copy_(held[f"w.{name}"])
            if f"step.{name}" in held:
                optimizer.state[tensor] = {key: held[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}


def compare(given: Namespace) -> None:
    """Rounds of both samplers by turns, each pair from the same weights."""
    report: dict[str, Any] = {
        "setting": setting_of(given), **provenance(torch.device("cpu")), "rounds": [],
    }  # fmt: skip
    for number, problems in enumerate(islice(problems_of(given, 0), given.rounds)):
        for sampler in ("engine", "plain"):
            pipe = loaded(given.threshold)
            sampled(pipe, problems[:1], 0, given, sampler)  # what is done once
            policy = policy_of(pipe, given)
            optimizer = torch.optim.AdamW(trained(policy).values(), lr=given.lr)
            one = one_round(pipe, policy, problems, optimizer, given, number, sampler=sampler)
            report["rounds"].append({"sampler": sampler, **one})
            print(json.dumps(report["rounds"][-1]), flush=True)
    for sampler in ("engine", "plain"):
        own = [one for one in report["rounds"] if one["sampler"] == sampler]
        sampling, whole = sum(one["sampling_cpu_s"] for one in own), sum(one["update_cpu_s"] for one in own)
        count = len(own) * given.prompts * given.group
        report[sampler] = {"rollouts_a_cpu_s": count / sampling, "rounds_a_cpu_h": 3600 * len(own) / (sampling + whole)}
    report["rollouts_ratio"] = report["engine"]["rollouts_a_cpu_s"] / report["plain"]["rollouts_a_cpu_s"]
    report["rounds_ratio"] = report["engine"]["rounds_a_cpu_h"] / report["plain"]["rounds_a_cpu_h"]
    print(json.dumps({key: report[key] for key in ("engine", "plain", "rollouts_ratio", "rounds_ratio")}))
    save(report, given.out)


def table(given: Namespace) -> None:
    """What the runs of some folders came to: their curves, and CPU seconds of all rounds."""
    report: dict[str, Any] = {**provenance(torch.device("cpu")), "runs": []}
    for folder in given.runs:
        run = json.loads((folder / "run.json").read_text())
        rounds, setting, curve = run.pop("rounds"), run["setting"], run["curve"]
        run |= {"rounds": len(rounds), "right": [round(one["right"], 3) for one in rounds]}
        run["cpu_s"] = {name: round(sum(one[f"{name}_cpu_s"] for one in rounds)) for name in ("sampling", "update")}
        report["runs"].append(run)
        print(setting["estimator"], setting["seed"], len(rounds), curve[0], curve[-1], run.get("last"))
    save(report, given.out)


def settings(words: list[str] | None = None) -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("task", choices=("train", "compare", "table"))
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--estimator", default="diffu_grpo")
    parser.add_argument("--options", type=json.loads, default={}, help="of the estimator, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=67)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--answers", type=int, default=200, help="unseen problems")
    parser.add_argument("--unseen", type=int, default=7, help="which ones: settings were tried on those of 0")
    parser.add_argument("--passes", type=int, default=0, help="forwards of a sample that an update sees; 0: all")
    parser.add_argument("--seconds", type=float, default=2400.0)
    parser.add_argument("--threshold", type=float, default=0.6)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--quick", type=float, default=0.5, help="reward of a right answer for needing few forwards")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warm", type=int, default=3, help="rounds in which the rate rises")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the distance to the first policy")
    parser.add_argument("--peft", type=int, default=0, help="rank of the adapter that is trained; 0: all weights are")
    parser.add_argument("--negative", type=float, default=0.1, help="weight of samples worse than their group")
    parser.add_argument("--std", action="store_true", help="advantages are divided by their group's deviation")
    parser.add_argument("--splits", type=int, default=1, help="steps of the optimizer a round")
    parser.add_argument("--explore", type=float, default=0.6, help="the decoder's threshold in rollouts")
    parser.add_argument("--every", type=int, default=16, help="rounds between evaluations")
    parser.add_argument("--last", type=int, default=0, help="further unseen problems for the last policy")
    parser.add_argument("--new", type=int, default=64, help="positions of an answer")
    parser.add_argument("--stops", action="store_true", help="the plain loop ends an answer at its stop token, too")
    return parser.parse_args(words)


def main() -> None:
    given = settings()
    torch.set_num_threads(1)
    {"train": train, "compare": compare, "table": table}[given.task](given)


if __name__ == "__main__":
    main()
