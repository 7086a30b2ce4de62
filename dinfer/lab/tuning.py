"""Finds the fastest recipe that loses no more accuracy than allowed, with Optuna, and checks it on fresh problems.

Accuracy is lost against a reference recipe, on the same problems. The search sees the calibration problems alone; a
candidate counts only if it keeps the bound on held-out problems too. `Objective` says how a recipe is measured, so
any task can be tuned on.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dinfer.core.recipe.recipe import IncompatibleRecipe
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, Registry, options_of, unknown
from dinfer.lab.metrics import Difference, Metrics

Components = dict[str, dict[str, Any]]  # the components of a recipe but the model, each its name and options
Space = Mapping[str, Mapping[str, Any]]  # kind -> "name" or option -> a list, or a range {low, high, step}
Split = Literal["calibration", "heldout"]
KINDS: dict[str, Registry] = {"iteration": ITERATIONS, "decoder": DECODERS, "cache": CACHES}


class NothingFound(RuntimeError):
    """No recipe was both fast and good enough; the message says how close the search came."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A recipe's figures on one split, and the score of each problem in order."""

    metrics: Metrics
    scores: list[float]


Objective = Callable[[Components, Split], Measured]
"""Measures a recipe. Raises IncompatibleRecipe or ValueError for one that cannot run."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One recipe of the search, as it was measured."""

    parts: Components
    speed: float
    drop: Difference
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The recipe that was found, and what speaks for it."""

    parts: Components
    calibration: Tried
    heldout: Tried
    reference: dict[str, dict[str, Any]]  # metrics of the reference by split
    tried: list[Tried]
    verified: int  # candidates that were measured on the held-out problems, this one included
    refused: dict[str, int]  # recipes of the space that cannot run: how many for each reason


def check_space(space: Space, reference: Components) -> None:
    """Raises ValueError for a search space with a name that no component has, or with nothing to choose from."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"space={space!r} names nothing to search: write space.decoder.name=[threshold,factor]")
    for kind, choices in space.items():
        if kind not in KINDS:
            raise unknown("component in space:", kind, list(KINDS))
        if not isinstance(choices, Mapping):
            raise ValueError(f"space.{kind}={choices!r} must say what of it: write space.{kind}.name=[...]")
        names = choices.get("name", [reference[kind]["name"]])
        if not isinstance(names, (list, tuple)) or not names:
            raise ValueError(f"space.{kind}.name={names!r} must be a list of names")
        for name in names:
            KINDS[kind].get(name)
        # Of any component: one that is left out of the search takes its options along.
        known = sorted({info.name for name in KINDS[kind].names() for info in options_of(KINDS[kind].get(name))})
        for option, values in choices.items():
            if option not in ("name", *known):
                raise unknown(f"option in space of {kind}:", option, known)
            _check_values(f"space.{kind}.{option}", values)


def _check_values(key: str, values: Any) -> None:
    if isinstance(values, (list, tuple)) and values:
        return
    if isinstance(values, Mapping) and {"low", "high"} <= values.keys() <= {"low", "high", "step"}:
        low, high, step = values["low"], values["high"], values.get("step", 1)
        if all(type(value) in (int, float) for value in (low, high, step)) and low < high and step > 0:
            return
    raise ValueError(f"{key}={values!r} must be a list, or {{low: 0.5, high: 0.99, step: 0.01}} with low < high")


def suggest(trial: Any, space: Space, reference: Components) -> Components:
    """One recipe of the space: an option goes to the components that have it, all else is the reference's.

    A component that is not the reference's begins with its own defaults.
    """
    parts = {kind: dict(part) for kind, part in reference.items()}
    for kind, choices in space.items():
        name = reference[kind]["name"]
        if "name" in choices:
            name = trial.suggest_categorical(kind, list(choices["name"]))
        if name != reference[kind]["name"]:
            parts[kind] = {"name": name}
        for info in options_of(KINDS[kind].get(name)):
            if info.name in choices:
                # Named by component, since what a value means is the component's affair.
                parts[kind][info.name] = _value(trial, f"{kind}.{name}.{info.name}", choices[info.name])
    return parts


def _value(trial: Any, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        return trial.suggest_categorical(name, list(values))
    low, high, step = values["low"], values["high"], values.get("step")
    if all(type(value) is int for value in (low, high, step or 1)):
        return trial.suggest_int(name, low, high, step=step or 1)
    return round(trial.suggest_float(name, low, high, step=step), 10)


def tune(
    objective: Objective,
    space: Space,
    reference: Components,
    *,
    max_drop: float = 1.0,
    trials: int = 40,
    goal: Literal["tps", "tpf"] = "tps",
    verify: int = 3,
    seed: int = 0,
) -> Iterator[Tried | Found]:
    """Yields each recipe that was measured, and at last what was found. What cannot run is counted, and no trial.

    `max_drop`: points of accuracy that may be lost on either split; `goal`: what fast means, tokens a second or a
    forward; `verify`: how many candidates, the fastest first, may be measured on the held-out problems: each is one
    more chance to pass by luck. Raises NothingFound, ImportError without optuna, ValueError for bad input.
    """
    for label, value, least in (("max_drop", max_drop, 0), ("trials", trials, 1), ("verify", verify, 1)):
        if not value >= least:
            raise ValueError(f"{label}={value} must be at least {least}")
    check_space(space, reference)
    references = {"calibration": objective(reference, "calibration")}

    def tried(parts: Components, split: Split) -> Tried:
        measured = objective(parts, split)
        row = measured.metrics.row()
        return Tried(parts, row[goal], Difference.between(references[split].scores, measured.scores), row)

    ran: list[Tried] = []
    refused: Counter[str] = Counter()
    for one in _search(tried, space, reference, max_drop, trials, seed):
        if isinstance(one, str):
            refused[one] += 1
            continue
        ran.append(one)
        yield one
    if not ran:
        raise NothingFound(f"none of {refused.total()} recipes runs; the first of them: {next(iter(refused))}")
    yield _verified(ran, dict(refused), references, tried, objective, reference, max_drop, verify)


def _search(
    tried: Callable[[Components, Split], Tried], space: Space, reference: Components, max_drop: float, trials: int,
    seed: int,
) -> Iterator[Tried | str]:  # fmt: skip
    """Yields so many recipes of the space, each once, and why a recipe cannot run."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler, anywhere = _sampler(trials, seed), optuna.samplers.RandomSampler(seed)
    study = optuna.create_study(direction="maximize")
    seen: set[str] = set()
    ran, again = 0, False
    for _ in range(10 * trials):  # a small space may hold fewer recipes that run
        if ran == trials:
            break
        # A sampler that suggests what it knows has settled too early: then the next recipe is any.
        study.sampler = anywhere if again else sampler
        trial = study.ask()
        parts = suggest(trial, space, reference)
        key = json.dumps(parts, sort_keys=True)
        if again := key in seen:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        seen.add(key)
        try:
            one = tried(parts, "calibration")
        except (IncompatibleRecipe, ValueError) as error:
            # It counts as one that loses everything, so that the sampler turns to others.
            trial.set_constraint("drop", 100.0)
            study.tell(trial, 0.0)
            yield str(error)
            continue
        ran += 1
        trial.set_constraint("drop", one.drop.points - max_drop)
        study.tell(trial, one.speed)
        yield one


def _sampler(trials: int, seed: int) -> Any:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # By group: which options there are depends on the components.
        startup = min(10, max(trials // 3, 1))
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=startup)


def _verified(
    seen: Sequence[Tried], refused: dict[str, int], references: dict[str, Measured], tried: Any, objective: Objective,
    reference: Components, max_drop: float, verify: int,
) -> Found:  # fmt: skip
    """The fastest recipe that keeps the bound on both splits."""
    within = sorted((one for one in seen if one.drop.points <= max_drop), key=lambda one: -one.speed)
    if not within:
        closest = min(one.drop.points for one in seen)
        raise NothingFound(
            f"none of {len(seen)} recipes keeps the accuracy within {max_drop} points on the calibration problems (the "
            f"best loses {closest:.2f}): allow more with max_drop, try more with trials, or widen the space"
        )
    references["heldout"] = objective(reference, "heldout")
    for number, candidate in enumerate(within[:verify], 1):
        again = tried(candidate.parts, "heldout")
        if again.drop.points <= max_drop:
            rows = {split: measured.metrics.row() for split, measured in references.items()}
            return Found(candidate.parts, candidate, again, rows, list(seen), number, refused)
    raise NothingFound(
        f"the {min(verify, len(within))} fastest recipes keep the accuracy within {max_drop} points on the calibration "
        "problems, but not on the held-out ones: use more problems, or a smaller max_drop"
    )
