"""answers a file of requests, in OpenAI's batch format

usage: dinfer batch IN.jsonl OUT.jsonl [model=NAME] [overrides ...]
       dinfer batch - - < IN.jsonl > OUT.jsonl

Each line of IN is a request that `dinfer serve` would take:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": [...]}}
Each line of OUT is the answer to one request, written as soon as it is there. So the order may differ: `custom_id`
names the request. If a line is wrong, `error` of its answer says why. If the command is killed or interrupted, call it
again to continue. Needs fastapi: pip install 'dinfer[serve]'. docs/serving.md says more."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dinfer.cli.application import OVERRIDE, launch
from dinfer.cli.commands.serve import check, made, name_of, needed, recipes
from dinfer.cli.conf import GROUPS, counted, held_of, need, ranks_of, setting
from dinfer.cli.terminal import FAILED, Interrupted, Report, fail, say, several
from dinfer.lab.outputs import check_file

if TYPE_CHECKING:
    from dinfer.serving.batch_file import Answering
    from dinfer.serving.settings import Settings

STANDARD = "-"
WAITING = 2  # lines in flight for each row, so that none is free while the next line is read


def run(args: Namespace) -> None:
    """Answers the requests of one file in another."""
    if args.multirun:
        raise ValueError("-m would write one file several times: run each value with an OUT of its own")
    paths = [word for word in args.words if not OVERRIDE.fullmatch(word)] + args.literal
    args.words, args.literal = [word for word in args.words if OVERRIDE.fullmatch(word)], []
    if len(paths) != 2 and not args.flags:
        raise ValueError(f"give two files, not {len(paths)}: dinfer batch IN.jsonl OUT.jsonl")
    launch(args, partial(batch, paths=paths, line=args.line))


def batch(config: dict[str, Any], *, paths: list[str], line: list[str]) -> None:
    """Answers what is not answered yet. `line`: the command line."""
    needed("dinfer batch")
    from dinfer.serving.settings import unlimited

    source, target = paths[0], Path("/dev/stdout" if paths[1] == STANDARD else paths[1])
    target = target.resolve() if target.is_file() else target
    overwrite, others = setting(config, "overwrite", bool), recipes(config, "batch")
    counted(config, "max_new_tokens")
    limits = unlimited(setting(config, "round_timeout", float), setting(config, "adapters", dict[str, str] | None))
    config = config | {"name": name_of(config)}
    check(config, others, limits)
    from dinfer.structure.form import form_of

    if (form := form_of(held := held_of(config))) is not None:
        form.check()  # what is wrong with it would be so for every line
    parts = {name: config[name] for name in ("name", "dtype", "quantize", "max_new_tokens", *GROUPS)}
    if target.is_file() or target.is_dir() or not target.exists():
        check_file(target)  # a named pipe, once it is closed, has no reader any more
    with opened(source) as asked, Report() as report:
        if source != STANDARD and target.is_file() and target.samefile(source):
            raise ValueError(f"{source} is IN and OUT: give another OUT")
        check_text(asked, source)
        report.at("loading")
        from dinfer.core.engine.errors import RankFailed
        from dinfer.serving.batch_file import Output, run
        from dinfer.serving.run import EngineFailed

        answering = answering_of(config, others, limits)
        progress = Progress(report)
        with Output(target, overwrite=overwrite) as output:
            try:
                run(asked, parts | {"recipes": others}, output, answering, progress, held)
            except (KeyboardInterrupt, OSError, EngineFailed, RankFailed) as error:
                kept = f"{target} keeps {several(len(output.ids), 'answer')}. To go on: {shlex.join(line)}"
                if isinstance(error, OSError):
                    raise OSError(error.errno, f"{error.strerror}. {kept}", error.filename) from error
                if isinstance(error, EngineFailed | RankFailed):
                    fail(type(error)(f"{error}. {kept}"), FAILED)
                raise Interrupted(f"interrupted; {kept}") from None
    say(progress.summary())
    if progress.errors == progress.answered > 0:
        fail(ValueError(f"every line ended with an error; the first says: {progress.first}"), FAILED)


def answering_of(config: dict[str, Any], others: dict[str, dict[str, Any]], limits: Settings) -> Answering:
    """What answers the requests: an engine here, or several on a Ray cluster. Raises ValueError."""
    from dinfer.serving.batch_file import answer_here

    rows = config["runtime"]["rows"]
    address, replicas = setting(config, "ray", str | None), setting(config, "replicas", int | None)
    if address is None:
        if replicas is not None:
            raise ValueError(f"replicas={replicas} needs a Ray cluster: give ray=auto too")
        return partial(answer_here, make=partial(made, config, others, limits), at_once=WAITING * rows)
    need("ray", "ray", "ray= needs Ray")
    if replicas is not None:
        counted(config, "replicas")
    from dinfer.scale.ray.cluster import connect, device_of, placed
    from dinfer.scale.ray.shards import answer_on_cluster

    connect(address, logs=False)
    device = device_of(setting(config, "device", str | None))
    replicas, resources = placed(replicas, ranks_of(config), device)
    make = partial(made, config | {"device": device}, others, limits)
    return partial(answer_on_cluster, make=make, replicas=replicas, resources=resources, at_once=WAITING * rows)


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """The input. It is read twice, so the content of a pipe is put into a file first."""
    path = Path("/dev/stdin" if source == STANDARD else source)
    if source != STANDARD and path.is_file():
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as spool:
        with path.open("rb") if source != STANDARD else sys.stdin.buffer as pipe:
            shutil.copyfileobj(pipe, spool)
        spool.seek(0)
        yield spool


def check_text(asked: BinaryIO, source: str) -> None:
    """Raises ValueError for a compressed file or one in UTF-16: each of its lines would be an error of its own."""
    begin = asked.read(4)
    try:
        text = getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(
            f"{source} is no text in UTF-8, since it begins with {begin!r}. If it is compressed, decompress it first: "
            f"gzip -dc {source} | dinfer batch - OUT.jsonl"
        )


class Progress:
    """What is known of the answers so far."""

    def __init__(self, report: Report) -> None:
        self._report, self._began = report, time.monotonic()
        self._before = self._done = self.errors = self._tokens = self._forwards = 0
        self.first = ""  # what the first error says

    def __call__(self, done: int, total: int, answer: dict[str, Any] | None) -> None:
        self._done = done
        if answer is None:
            self._before = done
        elif answer["error"] is not None:
            self.errors += 1
            self.first = self.first or answer["error"]["message"]
        else:
            usage = answer["response"]["body"]["usage"]
            self._tokens += usage.get("completion_tokens") or usage.get("output_tokens", 0)  # by API
            self._forwards += usage["dinfer"]["forwards"]
        detail = f"{self.errors} with an error" if self.errors else ""
        self._report.at("answering", done, total, detail)

    @property
    def answered(self) -> int:
        """Lines that this run answered, with an error or without."""
        return self._done - self._before

    def summary(self) -> str:
        tpf = self._tokens / self._forwards if self._forwards else 0.0
        return (
            f"{several(self.answered, 'answer')}, {several(self.errors, 'error')} among them, and "
            f"{self._before} from before; "
            f"{self._tokens} tokens, {self._forwards} forwards, {tpf:.2f} tokens per forward (TPF), "
            f"{time.monotonic() - self._began:.2f} s"
        )
