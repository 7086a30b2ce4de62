"""Unmodified agents against `dinfer`'s server, whose model is scripted: it asks for one edit of a file, then ends.

    python -m benchmarks.serving.agents --claude PATH --out benchmarks/results/agents.json

Everything but the tokens is the server's: routes, tools and their automata, calls, results that come back, streams.
The script writes what a model would: a call of the tool that edits files, and after its result one sentence.
`--claude`: the program of Claude Code; it runs in a folder of its own, with no other address than this server's.
`openai-agents` runs by its default settings, in the Python of `--python`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn

import dinfer
from benchmarks.provenance import begun, command_line, show
from dinfer.core.engine.request import Counts
from dinfer.core.loading.files import locate
from dinfer.serving import server as serving
from dinfer.serving.app import application
from dinfer.serving.rows import Event
from dinfer.serving.run import configured
from dinfer.serving.served import catalogue
from dinfer.serving.settings import Settings, listen

LENGTH = 300_000  # positions: Claude Code's tools take 70,000 tokens of this tokenizer
BEFORE, AFTER = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TASK = "calc.py subtracts where it should add. Mend it."
TOOLS = "{% if tools %}{{ '<|user|>' + (tools | tojson) }}{% endif %}"  # the template in the box does not write them
AGENT = """
import sys
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)

@function_tool
def edit(path: str, old: str, new: str) -> str:
    '''Replaces text in a file.'''
    text = open(path).read()
    open(path, 'w').write(text.replace(old, new))
    return 'done'

print(Runner.run_sync(Agent(name='mender', model='tiny', tools=[edit]), sys.argv[1]).final_output)
"""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(prompt: str, folder: Path) -> str:
    """What the model writes next, by how far the conversation is."""
    path, edit = str(folder / "calc.py"), ("return a - b", "return a + b")
    results = prompt.count("</tool_call>")  # of calls that have been made
    if '"name": "Edit"' in prompt:  # Claude Code, which reads a file before it edits it
        steps = [call("Read", file_path=path), call("Edit", file_path=path, old_string=edit[0], new_string=edit[1])]
    elif '"name": "edit"' in prompt:
        steps = [call("edit", path=path, old=edit[0], new=edit[1])]
    else:
        steps = []  # background work, such as a title
    return steps[results] if results < len(steps) else "It adds now."


@contextmanager
def scripted_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it has been asked."""
    asked: list[str] = []
    source, copy = Path(locate("tiny")), folder / "model"
    copy.mkdir()
    for file in source.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = json.dumps(json.loads(text) | {"max_sequence_length": LENGTH}).encode()
        if file.name == "tokenizer_config.json":
            known = json.loads(text)
            known["chat_template"] = TOOLS + known["chat_template"]
            text = json.dumps(known).encode()
        (copy / file.name).write_bytes(text)
    pipe = dinfer.load(str(copy), device="cpu", runtime=dinfer.Runtime(rows=1, max_length=LENGTH))

    async def events(served: Any, index: int, request: Any, *_: Any) -> AsyncGenerator[Event]:
        prompt = str(pipe.tokenizer.decode(request.tokens))
        text = scripted(prompt, folder)
        asked.append(text)
        for at in range(0, len(text), 8):
            yield Event(index, text[at : at + 8])
        yield Event(index, finish="stop", matched=0, counts=Counts(1, 0, 0, 1, 1, 0.0), tokens=len(text) // 3)

    serving.row_events = events  # type: ignore[assignment]
    made = catalogue(pipe, {"tiny": pipe.recipe}, max_new_tokens=4096, created=0)
    with listen(Settings(port=0)) as socket:
        socket.listen()
        state = serving.Server(made, Settings())
        web = uvicorn.Server(configured(application(state), state.settings))
        thread = threading.Thread(target=lambda: asyncio.run(web.serve(sockets=[socket])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}", asked
        finally:
            web.should_exit = True
            thread.join()


def run(command: list[str], folder: Path, **variables: str) -> dict[str, Any]:
    """Lets an agent mend the file."""
    (folder / "calc.py").write_text(BEFORE)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH",)}
    done = subprocess.run(
        command, cwd=folder, env=kept | {"HOME": str(home)} | variables, capture_output=True, text=True, timeout=240,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    mended = (folder / "calc.py").read_text() == AFTER
    return {"status": done.returncode, "mended": mended, "said": done.stdout.strip()[-300:], "err": done.stderr[-600:]}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--claude", type=Path)
    parser.add_argument("--python", type=Path)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu")) | {"agents": {}}
    with tempfile.TemporaryDirectory() as made, scripted_server(Path(made)) as (address, asked):
        folder = Path(made)
        if given.claude is not None:
            command = [str(given.claude), "-p", TASK, "--model", "tiny", "--permission-mode", "acceptEdits"]
            found = run(
                command, folder, ANTHROPIC_BASE_URL=address, ANTHROPIC_API_KEY="none",
                ANTHROPIC_SMALL_FAST_MODEL="tiny", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            )  # fmt: skip
            version = subprocess.run([str(given.claude), "--version"], capture_output=True, text=True).stdout.strip()
            report["agents"]["Claude Code"] = {"version": version, **found, "answers": [*asked]}
            asked.clear()
        if given.python is not None:
            command = [str(given.python), "-c", AGENT, f"{TASK} It is {folder / 'calc.py'}."]
            found = run(command, folder, OPENAI_BASE_URL=f"{address}/v1", OPENAI_API_KEY="none")
            report["agents"]["openai-agents"] = {**found, "answers": [*asked]}
    show(report, given.out)


if __name__ == "__main__":
    main()
