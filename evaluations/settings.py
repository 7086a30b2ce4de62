"""The settings of an evaluation. Neither lm-eval nor torch is imported, so that a wrong one is told at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dinfer.core.registry import check_range, typed, unknown

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FORMS = ("schema", "regex", "choice", "grammar", "posterior")  # as `Pipeline.generate` takes them
KINDS: dict[str, Any] = {
    "until": str | tuple[str, ...] | None, "do_sample": bool, "temperature": float, "infill": bool,
    **dict.fromkeys(LENGTHS, int),
}  # fmt: skip
OURS = (*KINDS, *FORMS)


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likelihoods are estimated."""

    samples: int = 128  # noised copies of each answer; fewer if that is exact
    seed: int = 0
    guidance: float = 0.0
    greedy: bool = True  # check whether greedy decoding gives the answer; false: report that it does not

    def __post_init__(self) -> None:
        check_range("likelihood", self, "samples", least=1)
        check_range("likelihood", self, "guidance", least=0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program."""

    seconds: int = 5
    megabytes: int = 1024

    def __post_init__(self) -> None:
        check_range("code", self, "seconds", "megabytes", least=1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an evaluation other than the recipe."""

    tasks: tuple[str, ...]
    include: tuple[str, ...] = ()  # folders with the user's tasks
    limit: int | float | None = None  # documents of each task; below 1: that share of them
    documents: tuple[int, int] | None = None  # instead of a limit: only documents [first, end)
    num_fewshot: int | None = None
    chat: bool | None = None  # use the chat template; None: if the tokenizer has one
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    metric: str | None = None  # counts as accuracy; None: the first of each task
    allow_code: bool = False
    code: Limits = field(default_factory=Limits)
    likelihood: Likelihood = field(default_factory=Likelihood)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one, such as tasks=mini_gsm or tasks=[gsm8k,ifeval]")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit={self.limit} must be above 0: documents, or a share below 1")
        if self.limit is not None and self.limit >= 1 and self.limit != int(self.limit):
            raise ValueError(f"limit={self.limit} must be a whole number of documents, or a share below 1")
        if self.documents is not None and self.limit is not None:
            raise ValueError(f"limit={self.limit} and documents={self.documents} are given: choose one of them")
        check_range("", self, "num_fewshot", least=0)
        check_range("", self, "max_new_tokens", least=1)


def check_kwargs(kwargs: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raises ValueError for a wrong value in `generation_kwargs`, or a name that is neither lm-eval's nor an option."""
    known = [name for full in options for name in (full.partition(".")[2], full)]
    for name in kwargs:
        if name not in (*OURS, *known):
            raise unknown("name in gen_kwargs:", name, sorted({*OURS, *known}))
    typed(KINDS, {name: value for name, value in kwargs.items() if name in KINDS}, prefix="gen_kwargs: ")
    for name in LENGTHS:
        if kwargs.get(name, 1) < 1:
            raise ValueError(f"gen_kwargs: {name}={kwargs[name]} must be an integer, at least 1")
