"""How the server runs: address, limits, keys. It imports little, so that faults are known before a model is loaded."""

import ipaddress
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dinfer.core.registry import check_range

LEAST_KEY = 8  # characters
NO_LIMIT = 10**9
DECISIONS = "choice", "noul", "score"  # kinds of questions, as System One names them
Labels = Literal["letters", "values", "names"]  # what stands in the slot of a question
FORMS: dict[str, tuple[Any, ...]] = {"labels": get_args(Labels), "joint": (False, True)}  # how questions are read


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host's name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of `dinfer serve`. Raises ValueError for values that contradict each other or are not safe."""

    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""  # what a proxy leaves in front of the paths, such as /llm
    api_key: str | None = None  # `env:NAME`, `file:PATH`; never the key itself
    insecure: bool = False  # allows other addresses than loopback without a key
    max_requests: int = 1024  # rows that run or wait
    max_tokens: int = 4_194_304  # positions of the canvases of these rows
    max_body: int = 4_194_304  # bytes of a request
    max_connections: int = 2048  # requests that wait for an answer
    warm_up: int = 0  # tokens of the prompts that run before the server is ready; 0: none run
    max_new_tokens: int = 256  # default of a request
    deadline: float = 600.0  # seconds that a request may take
    send_timeout: float = 30.0  # seconds that a client may take to read a piece
    round_timeout: float = 300.0  # seconds after which a round of steps counts as hung, and the server ends
    grace: float = 30.0  # seconds that running requests have after SIGTERM
    log_prompts: bool = False
    rollouts: bool = False  # serves trainers: samples with their steps, likelihoods, and new weights
    adapters: dict[str, str] | None = None  # LoRA adapters by name, and more over HTTP; null: none, also later
    aliases: dict[str, str] | None = None  # other names of served models, for clients that choose none
    # Of decisions: temperatures by their kind, and the form that they are read in; null: 1, and letters.
    calibration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_range("", self, "max_requests", "max_tokens", "max_body", "max_connections", "max_new_tokens", least=1)
        for name in ("deadline", "send_timeout", "round_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0 seconds")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path} must begin with / and not end with it, such as /llm")
        check_range("", self, "grace", "warm_up", least=0)
        check_range("", self, "port", least=0, most=65535, what="0 for any free one, else ")
        for kind, value in (self.calibration or {}).items():
            if kind in FORMS:
                if value not in FORMS[kind]:
                    raise ValueError(f"calibration.{kind}={value!r} must be one of {', '.join(map(str, FORMS[kind]))}")
            elif kind not in DECISIONS:
                known = ", ".join([*DECISIONS, *FORMS])
                raise ValueError(f"calibration: {kind!r} is no kind of decision and no part of a form. Known: {known}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < NO_LIMIT:
                raise ValueError(f"calibration.{kind}={value!r} must be a number above 0")
        if not is_loopback(self.host) and self.api_key is None and not self.insecure:
            raise ValueError(
                f"host={self.host} can be reached from other machines, and there is no api_key. Set "
                "api_key=env:NAME or api_key=file:PATH, or say insecure=true to serve everybody."
            )
        for given, does in (
            (self.rollouts, "rollouts=true lets clients replace the weights"),
            (self.adapters is not None, "adapters= lets clients load files of this machine"),
        ):
            if given and not is_loopback(self.host) and self.api_key is None:
                raise ValueError(f"{does}, and host={self.host} can be reached from other machines: set "
                                 "api_key=env:NAME or api_key=file:PATH")  # fmt: skip

    def keys(self) -> list[bytes]:
        """The keys that clients may use, one a line. Raises ValueError or OSError."""
        if self.api_key is None:
            return []
        kind, _, where = self.api_key.partition(":")
        if kind == "env" and where:
            if where not in os.environ:
                raise ValueError(f"api_key={self.api_key}: the environment has no variable {where}")
            text = os.environ[where]
        elif kind == "file" and where:
            text = Path(where).read_text(encoding="utf-8")
        else:
            raise ValueError(
                "api_key must be env:NAME or file:PATH: a key on the command line is seen by everybody on the machine"
            )
        keys = [line.strip().encode() for line in text.splitlines() if line.strip()]
        if not keys or any(len(key) < LEAST_KEY for key in keys):
            raise ValueError(f"{self.api_key.partition(':')[2]} must hold keys of at least {LEAST_KEY} characters")
        return keys


def unlimited(round_timeout: float, adapters: dict[str, str] | None = None) -> Settings:
    """Settings without limits: the caller says how many requests run at a time, and no client waits.

    `round_timeout`: seconds after which a round of steps counts as hung. Raises ValueError.
    """
    return Settings(
        max_requests=NO_LIMIT, max_tokens=NO_LIMIT, max_body=NO_LIMIT, deadline=NO_LIMIT, send_timeout=NO_LIMIT,
        round_timeout=round_timeout, adapters=adapters,
    )  # fmt: skip


def check_aliases(aliases: Mapping[str, str], served: Collection[str]) -> None:
    """Raises ValueError for another name of a model that has it already, or of one that is not served."""
    for alias, name in aliases.items():
        if alias in served or name not in served:
            why = "is served itself" if alias in served else f"stands for {name!r}, which is not served"
            raise ValueError(f"aliases: {alias!r} {why}. Served: {', '.join(served)}")


def listen(settings: Settings, *, shared: bool = False) -> socket.socket:
    """The socket that the server will listen on. Raises an OSError that names the address.

    `shared`: a later server of this user may listen there, too, before this one ends.
    """
    made = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
    try:
        with naming(settings):
            made.bind((settings.host, settings.port))
    except OSError:
        made.close()
        raise
    return made


@contextmanager
def naming(settings: Settings) -> Iterator[None]:
    """Names the address in an error of its socket, and says what to do."""
    try:
        yield
    except OSError as error:
        where = f"host={settings.host} port={settings.port}"
        raise OSError(f"{where}: {error.strerror}. Choose another port, or port=0 for any free one") from error


def url(host: str, port: int) -> str:
    """The address of a page."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
