"""What goes wrong for one request goes wrong for no other; and how the server ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from support.command_line import CommandLine
from support.rank_processes import until
from support.serving import QUESTION, Client, served, tiny

import dinfer
from dinfer.cli.commands import serve as serve_command
from dinfer.core.engine.batch import Batch
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.pages import prompt_keys
from dinfer.core.engine.row import Row
from dinfer.serving import run
from dinfer.serving.app import application
from dinfer.serving.settings import Settings, listen

BAD, GOOD = 33, 64  # tokens of answers
PATH = "/v1/chat/completions"
LIMIT = 120.0  # seconds: what waits so long has failed, however busy the machine


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def body(tokens: int = GOOD, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, **more}


def text_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def fails_for_the_bad(patch: pytest.MonkeyPatch, owner: type, name: str, error: Exception, row_of: Callable) -> None:
    right = getattr(owner, name)

    def method(self: Any, *given: Any) -> Any:
        if row_of(self, *given).request.new_tokens == BAD:
            if name == "failure":
                return error
            raise error
        return right(self, *given)

    patch.setattr(owner, name, method)


def nan(patch: pytest.MonkeyPatch) -> None:
    fails_for_the_bad(patch, Row, "failure", NonFiniteLogits("NaN"), lambda row, *_: row)


def no_memory(patch: pytest.MonkeyPatch) -> None:
    fails_for_the_bad(patch, Batch, "claim", MemoryError("full"), lambda _, row: row)


@pytest.mark.parametrize(
    ("goes_wrong", "status", "code"), [(nan, 500, "row_failed"), (no_memory, 503, "out_of_memory")]
)
def test_a_row_fails_alone(
    client: Client, goes_wrong: Callable, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = text_of(client.ask(PATH, body()))
    goes_wrong(monkeypatch)

    async def both() -> list[httpx.Response]:
        return await asyncio.gather(
            *(client.http.post(PATH, json=b) for b in (body(), body(BAD), body(), body(BAD, stream=True)))
        )

    good, bad, also, streamed = client.loop.run(both())
    assert text_of(good) == text_of(also) == want
    assert bad.status_code == status and bad.json()["error"]["code"] == code
    assert "Traceback" not in bad.text
    if status == 500:
        assert bad.headers["x-request-id"] in bad.json()["error"]["message"]
    told = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert told["error"]["code"] == code and told["request_id"] == streamed.headers["x-request-id"]
    assert free(client)


def free(client: Client) -> bool:
    taken = client.pipe.engine.occupancy()
    return taken["running"] == taken["waiting"] == 0 and taken["pages"] == taken["pages_free"]


def scope() -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "client": ("test", 1), "server": ("test", 80), "asgi": {"version": "3.0", "spec_version": "2.4"},
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(client: Client, stream: bool) -> None:
    """As a server of ASGI says so: the body, and later that there is nobody any more."""
    app, engine = application(client.server), client.pipe.engine
    content = json.dumps(body(stream=stream)).encode()
    running = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not running.is_set():
            running.set()
            return {"type": "http.request", "body": content, "more_body": False}
        while engine.occupancy()["running"] == 0:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    async def main() -> tuple[httpx.Response, int]:
        left = asyncio.create_task(app(scope(), receive, send))  # type: ignore[arg-type]
        stays = asyncio.create_task(client.http.post(PATH, json=body()))
        await left
        admitted = client.server.admission.requests
        return await stays, admitted

    stayed, admitted = client.loop.run(main())
    assert stayed.status_code == 200 and admitted <= 1
    assert free(client)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_neither_sends_nor_reads_is_given_up(reads: bool) -> None:
    content, sent, asked = json.dumps(body(stream=True)).encode(), list[dict[str, Any]](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if reads or asked.is_set():  # no body comes, or nothing behind it
            await asyncio.sleep(60)
        asked.set()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if not reads:
            await asyncio.sleep(60)

    with served(Settings(send_timeout=0.05)) as client:
        app = application(client.server)
        client.loop.run(app(scope(), receive, send))  # type: ignore[arg-type]
        assert [message["status"] for message in sent if "status" in message] == [408 if reads else 200]
        assert free(client) and client.server.admission.requests == 0


def test_a_device_that_has_failed_is_found_out(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(engine: Engine) -> None:
        raise RuntimeError("the GPU has fallen off the bus")

    broken = RuntimeError("illegal access")
    fails_for_the_bad(monkeypatch, Batch, "claim", broken, lambda _, row: row)
    assert client.ask(PATH, body(BAD)).status_code == 500
    assert client.ask("/health").status_code == 200  # the device answers: it was that request
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "check_device", lost)
        assert client.ask(PATH, body(BAD)).status_code == 500
        assert client.ask("/health").status_code == 503 and client.ask(PATH, body()).status_code == 503
    (engine,) = client.server.catalogue.engines.values()
    engine.failure = None


def test_a_request_ends_with_its_deadline(client: Client) -> None:
    late = client.ask(PATH, body(dinfer={"deadline": 1e-9}))
    assert late.status_code == 408 and late.json()["error"]["code"] == "deadline"
    refused = client.ask(PATH, body(dinfer={"deadline": 1e9}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dinfer.deadline"
    assert client.ask(PATH, body()).status_code == 200 and free(client)


def test_the_next_turn_shares_the_keys_of_the_last() -> None:
    pipe = dinfer.load(
        "tiny-llada2", iteration="block_diffusion", decoder="threshold", cache="block", device="cpu",
        runtime=dinfer.Runtime(rows=4, max_length=256, share=True),
    )  # fmt: skip
    with served(pipe=pipe) as client:
        turns = [{"role": "user", "content": "Start with 78: add 114, add 59, then add 96. What is the result?"}]
        first = text_of(client.ask(PATH, body(96, messages=turns)))
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "And what is 2 + 3?"}]
        next_prompt = client.ask("/v1/tokenize", {"model": "tiny", "messages": turns}).json()["tokens"]
        (want,) = dinfer.Pipeline(pipe.recipe, pipe.tokenizer, dinfer.Runtime(rows=1)).generate([turns])
        pages, unit = pipe.engine.loop.batch.pages, pipe.model.spec.causal_block
        shared = len(pages.published(prompt_keys(next_prompt, len(next_prompt), 16, unit))) * 16
        assert shared > len(pipe.encode(turns[:1])) + unit, "a block of the answer is among them"
        assert text_of(client.ask(PATH, body(128, messages=turns))) == want.text


@contextmanager
def deaf() -> Iterator[None]:
    """A signal that comes before the server listens to it, or after its end, does not end the tests."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serving(client: Client, talk: Callable[[str], None], made: socket.socket | None = None) -> list[BaseException]:
    """Runs the server as the command does, in this thread, and a client in another. Returns the client's errors."""
    errors: list[BaseException] = []

    def spoken(address: str) -> None:
        try:
            talk(address)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    def ready(address: str) -> None:
        threads.append(threading.Thread(target=spoken, args=(address,)))
        threads[0].start()

    threads: list[threading.Thread] = []
    with deaf(), made or listen(client.server.settings) as door:
        try:
            run.serve(client.server, door, ready)
        finally:
            for thread in threads:
                thread.join()
    return errors


def http_client(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=LIMIT)


def test_sigterm_lets_running_answers_finish() -> None:
    said: list[str] = []

    def talk(address: str) -> None:
        with http_client(address) as http, http.stream("POST", PATH, json=body(stream=True)) as got:
            for line in got.iter_lines():
                if not said:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.05)
                said.append(line)

    with served(Settings(port=0, grace=LIMIT)) as client:
        assert serving(client, talk) == []
        assert free(client)
    assert [line for line in said if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_a_second_interrupt_or_the_end_of_the_grace_time_cuts_answers_off(
    grace: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said, cut, step, steps = list[str](), threading.Event(), Engine.step, count()

    def talk(address: str) -> None:
        asked = body(64, stream=True, dinfer={"threshold": 1.0})
        with (
            http_client(address) as http, http.stream("POST", PATH, json=asked) as got, ThreadPoolExecutor(1) as reader,
        ):  # fmt: skip
            lines = got.iter_lines()
            said.append(next(lines))
            rest = reader.submit(said.extend, lines)
            os.kill(os.getpid(), signal.SIGINT)
            while not wait([rest], 0.1).done:
                if grace:
                    os.kill(os.getpid(), signal.SIGINT)
            assert isinstance(rest.exception(), httpx.TransportError)
            cut.set()

    def held(engine: Engine) -> Any:
        """An answer that has begun ends no sooner than its connection."""
        if said or next(steps) > 32:
            cut.wait(LIMIT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", held)
    with served(Settings(port=0, grace=grace)) as client:
        assert serving(client, talk) == []
        assert until(lambda: free(client))
    assert said and "data: [DONE]" not in said
    assert "complete or not" in caplog.text
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_an_engine_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[httpx.Response] = []

    def talk(address: str) -> None:
        with http_client(address) as http:
            assert http.get("/health").status_code == 200
            monkeypatch.setattr(Engine, "step", lambda engine: (_ for _ in ()).throw(RuntimeError("a defect")))
            told.append(http.post(PATH, json=body()))
            told.extend(http.get(path) for path in ("/health", "/ready"))
            told.append(http.post(PATH, json=body()))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "FAREWELL", LIMIT)
    with served(Settings(port=0)) as client, pytest.raises(run.EngineFailed, match="a defect"):
        serving(client, talk)
    assert [response.status_code for response in told] == [500, 503, 503, 503]


def test_a_server_whose_engine_has_failed_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(address: str) -> None:
        with http_client(address) as http, suppress(httpx.TransportError):
            http.post(PATH, json=body())

    monkeypatch.setattr(Engine, "step", lambda engine: (_ for _ in ()).throw(RuntimeError("a defect")))
    monkeypatch.setattr(run, "FAREWELL", 0.01)
    with served(Settings(port=0)) as client, pytest.raises(run.EngineFailed, match="a defect"):
        serving(client, talk)


def test_an_engine_that_hangs_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    told, awake = dict[str, httpx.Response](), threading.Event()

    def talk(address: str) -> None:
        with http_client(address) as http:
            assert http.get("/health").status_code == 200
            told["asked"] = http.post(PATH, json=body())
            told.update({path: http.get(path) for path in ("/health", "/ready")})
        os.kill(os.getpid(), signal.SIGTERM)

    def hang(engine: Engine) -> list[Any]:
        awake.wait()
        return []

    monkeypatch.setattr(run, "FAREWELL", LIMIT)
    monkeypatch.setattr(Engine, "step", hang)
    try:
        with (
            served(Settings(port=0, round_timeout=0.2)) as client,
            pytest.raises(run.EngineFailed, match=r"longer than 0\.2 seconds"),
        ):
            serving(client, talk)
    finally:
        awake.set()
    assert {path: response.status_code for path, response in told.items()} == {
        "asked": 500, "/health": 503, "/ready": 503,
    }  # fmt: skip
    assert "EngineHung" in told["/health"].json()["error"]["message"]


def test_one_server_alone_listens_at_an_address() -> None:
    with listen(Settings(port=0)) as other:
        port = other.getsockname()[1]
        with served(Settings(port=port)) as client, listen(client.server.settings) as made:
            other.listen()
            with pytest.raises(OSError, match=rf"port={port}: Address already in use. Choose another port"):
                run.serve(client.server, made, lambda address: None)


def test_a_server_that_cannot_say_where_it_is_ends() -> None:
    def full(address: str) -> None:
        raise OSError(28, "No space left on device")

    with (
        served(Settings(port=0)) as client, listen(client.server.settings) as made,
        pytest.raises(OSError, match="No space left"),
    ):  # fmt: skip
        run.serve(client.server, made, full)


def test_an_interrupt_that_is_lost_while_the_model_loads_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a callback of an import, where Python ignores errors."""

    def loads(*_: Any) -> Any:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(LIMIT)
        return tiny()

    # No other module takes it from there: one that did, and is first imported here, would keep it.
    monkeypatch.setattr(serve_command, "pipeline", loads)
    monkeypatch.setattr(run, "serve", lambda *_: pytest.fail("it serves"))
    assert CommandLine(monkeypatch, capsys)("serve", "port=0").status == 130


@contextmanager
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Client, int, int], list[httpx.Response]]]:
    """Asks as often at once. None is answered before as many as given are refused."""
    go, step = threading.Event(), Engine.step

    async def ask(client: Client, count: int, refused: int) -> list[httpx.Response]:
        tasks = [asyncio.create_task(client.http.post(PATH, json=body(8))) for _ in range(count)]
        async with asyncio.timeout(LIMIT):
            for _, task in zip(range(refused), asyncio.as_completed(tasks), strict=False):
                await task
        go.set()
        return await asyncio.gather(*tasks)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda engine: (go.wait(LIMIT), step(engine))[1])
        yield lambda client, count, refused: client.loop.run(ask(client, count, refused))


def test_beyond_max_connections_requests_are_refused_in_the_api_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Settings(max_connections=2)) as client:
        with asked_at_once(monkeypatch) as ask:
            *good, refused = sorted(ask(client, 3, 1), key=lambda response: response.status_code)
        assert [response.status_code for response in good] == [200, 200]
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert client.ask(PATH, body()).status_code == 200


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Settings(max_body=len(json.dumps(body(8))) + 1)) as client:
        with asked_at_once(monkeypatch) as ask:
            codes = [response.status_code for response in ask(client, 24, 1)]
        assert codes.count(200) >= 16 and codes.count(503) == len(codes) - codes.count(200) > 0
        assert client.ask(PATH, body(8)).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp"])
def test_a_connection_without_a_request_ends(sent: bytes) -> None:
    read: list[bytes] = []

    def talk(address: str) -> None:
        read.append(link.recv(1000))
        os.kill(os.getpid(), signal.SIGTERM)

    with served(Settings(port=0, send_timeout=0.05)) as client:
        made = listen(client.server.settings)
        made.listen()
        with socket.create_connection(made.getsockname()[:2], timeout=LIMIT) as link:
            link.sendall(sent)  # before the server runs, so that it is there in time
            assert serving(client, talk, made) == []
    if not sent:
        assert read == [b""]
    else:
        assert read[0].startswith(b"HTTP/1.1 408 ") and b"the head of the request did not come" in read[0]
