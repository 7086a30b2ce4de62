"""A conversation as a user has it: in a pipe, and on a terminal, in this process."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import threading
from pathlib import Path
from select import select

import pytest
from support.command_line import CommandLine

from dinfer.__main__ import main
from dinfer.core.pipeline import Pipeline, load
from dinfer.demo.problems import generate

FIRST, SECOND = (problem.question for problem in generate("heldout", 2, 0))
QUICK = ("device=cpu", "max_new_tokens=32")


@pytest.fixture(scope="module")
def tiny() -> Pipeline:
    return load("tiny", device="cpu")


def talked(pipe: Pipeline, *questions: str, max_new_tokens: int = 32) -> list[str]:
    """The library's answers, turn by turn."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = pipe.generate([messages], max_new_tokens=max_new_tokens)[0].text
        messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages[1::2]]


def test_a_pipe_gets_the_answers_alone(dinfer: CommandLine, tiny: Pipeline) -> None:
    said = dinfer("chat", *QUICK, stdin=f"{FIRST}\n\n{SECOND}\n/clear\n{SECOND}\n/quit\n{FIRST}")
    assert said.status == 0 and said.err == ""
    assert said.out == "".join(f"{text}\n" for text in [*talked(tiny, FIRST, SECOND), *talked(tiny, SECOND)])


def test_settings_change_for_what_follows(dinfer: CommandLine, tiny: Pipeline) -> None:
    lines = ["/set max_new_tokens=8", FIRST, "/set decoder=fixed", "/set decoder.steps=8", "/clear", FIRST, "/set"]
    said = dinfer("chat", *QUICK, stdin="\n".join(lines))
    assert said.status == 0 and said.err == "max_new_tokens=8\ndecoder=fixed\ndecoder.steps=8\n"
    slow = load("tiny", device="cpu", decoder={"name": "fixed", "steps": 8})
    assert said.out == "".join(f"{pipe.generate(FIRST, max_new_tokens=8).text}\n" for pipe in (tiny, slow))


def test_a_conversation_is_saved_over_no_other_file(dinfer: CommandLine, tiny: Pipeline) -> None:
    said = dinfer("chat", *QUICK, stdin=f"{FIRST}\n/save a/talk.json\n/save a/talk.json\n")
    assert said.status == 0 and said.err == "wrote a/talk.json: 2 messages\n" * 2
    messages = json.loads(Path("a/talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert said.out == messages[-1]["content"] + "\n"
    again = dinfer("chat", *QUICK, stdin="/save a/talk.json\n")
    assert again.status == 2 and "a/talk.json is there already" in again.err


def test_an_answer_takes_the_room_that_there_is(dinfer: CommandLine, tiny: Pipeline) -> None:
    said = dinfer("chat", "device=cpu", stdin=f"{FIRST}\n{SECOND}\n")
    assert said.status == 0, said.err
    room = tiny.engine.max_length - len(tiny.encode(FIRST))
    assert said.out.startswith(f"{tiny.generate(FIRST, max_new_tokens=room).text}\n")
    said = dinfer("chat", "device=cpu", stdin="hello " * 300)
    assert said.status == 2 and "there are 256 positions for it and an answer" in said.err and "/clear" in said.err


def test_a_system_message_opens_it(dinfer: CommandLine, checkpoint: str) -> None:
    said = dinfer("chat", checkpoint, "system=Be brief.", *QUICK, stdin="Hi\n/clear\n/save talk.json")
    assert said.status == 0, said.err
    assert json.loads(Path("talk.json").read_text()) == {"messages": [{"role": "system", "content": "Be brief."}]}
    said = dinfer("chat", "system=Be brief.", *QUICK, stdin="Hi\n")
    assert said.status == 0, said.err  # the model in the box leaves it out


@pytest.mark.rest(but=7)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("/sett a=1", "unknown command '/sett'. Did you mean '/set'?"),
        ("/set decoder.treshold=1", "Did you mean 'threshold'?"),
        ("/set decoder.threshold=2", "must be between 0 and 1"),
        ("/set decoder.threshold=0.5,0.9", "has several values"),
        ("/set nonsense", "nonsense"),
        ("/set max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("/set model=tiny-llada2", "model cannot change within a chat"),
        ("/set runtime.rows=2", "runtime cannot change within a chat"),
        ("/save", "/save needs the name of a file"),
        ("/save .", ". is there already"),
        ("/save ~nobody-of-this-name/talk.json", "there is no user 'nobody-of-this-name'"),
        ("/clear all", "/clear takes nothing behind it"),
        ("hello " * 5000, "exceed the model's"),
    ],
)
def test_what_cannot_be_done_is_said(dinfer: CommandLine, lines: str, message: str) -> None:
    said = dinfer("chat", *QUICK, stdin=f"{lines}\n{FIRST}\n")
    assert said.status == 2 and message in said.err and said.out == ""


PATIENCE = 120  # seconds without a word


class Terminal:
    """The chat on a pseudo-terminal in this process; what it prints is read by a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, terminal: str) -> None:
        self._monkeypatch, self._terminal = monkeypatch, terminal
        self.shown, self._waiting = "", list[tuple[str, bytes | int]]()

    def run(self, *steps: tuple[str, bytes | int], args: tuple[str, ...] = QUICK) -> str:
        """`steps`: what to wait for, and then bytes to type or a signal to send. Returns all that was shown."""
        self._waiting = list(steps)
        self._parent, child = pty.openpty()
        reader = threading.Thread(target=self._read)
        reader.start()
        with open(child, "r+b", buffering=0) as raw, self._monkeypatch.context() as patch:
            stream = io.TextIOWrapper(raw, line_buffering=True, write_through=True)
            for name in ("stdin", "stdout", "stderr"):
                patch.setattr(f"sys.{name}", stream)
            patch.setenv("TERM", self._terminal)
            patch.setenv("COLUMNS", "60")
            main(["chat", *args])
        reader.join()
        assert "waited in vain" not in self.shown, self.shown
        return self.shown

    def _read(self) -> None:
        seen, waits, last = 0, 0, b""
        while True:
            if not select([self._parent], [], [], 1)[0]:
                waits += 1
                if waits > PATIENCE:
                    self.shown += f"\n(waited in vain for {self._waiting[:1]})"
                    os.write(self._parent, b"\x15\x04")  # ends the chat
                elif isinstance(last, int):  # it came after the prompt was shown, but before anything waited there
                    os.kill(os.getpid(), last)
                continue
            try:
                chunk = os.read(self._parent, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            self.shown, waits = self.shown + chunk.decode(errors="replace"), 0
            while self._waiting and (at := self.shown.find(self._waiting[0][0], seen)) >= 0:
                wanted, last = self._waiting.pop(0)
                seen = at + len(wanted)
                if isinstance(last, bytes):
                    os.write(self._parent, last)
                else:
                    os.kill(os.getpid(), last)
        os.close(self._parent)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(monkeypatch, "xterm-256color")


def test_a_terminal_shows_the_canvas_and_then_the_answer(terminal: Terminal, tiny: Pipeline) -> None:
    shown = terminal.run(("> ", f"{FIRST}\n".encode()), ("tokens per forward", b"/help\n"), ("/quit", b"/quit\n"))
    (want,) = talked(tiny, FIRST)
    assert "32 decoded" in shown and want.split("\n")[0] in shown and "/set decoder.threshold" in shown


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(terminal: Terminal) -> None:
    shown = terminal.run(
        ("> ", f"{FIRST}\n".encode()), ("step   3", signal.SIGINT), ("(ended", b""),
        ("> ", signal.SIGINT), ("(Ctrl-D ends the chat)", b"/set nonsense=1\n"),
        ("unknown setting 'nonsense'", b""), ("> ", b"/save talk.json\n"), ("> ", b"\x04"),
        args=(*QUICK, "delay=0.1"),
    )  # fmt: skip
    assert "Traceback" not in shown
    said = json.loads(Path("talk.json").read_text())["messages"]
    assert [message["role"] for message in said] in ([], ["user", "assistant"])


def test_a_plain_terminal_shows_the_text_as_it_grows(monkeypatch: pytest.MonkeyPatch, tiny: Pipeline) -> None:
    shown = Terminal(monkeypatch, "dumb").run(("> ", f"{FIRST}\n".encode()), ("tokens per forward", b"\x04"))
    (want,) = talked(tiny, FIRST)
    assert want in shown.replace("\r\n", "\n") and "\x1b[1;30" not in shown
