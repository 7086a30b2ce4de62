"""What clients send that is no request, or an unusual one: each is answered, in bounded time and memory."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("fastapi")

from support.serving import listening, served

from dinfer.serving import run
from dinfer.serving.run import MAX_HEAD
from dinfer.serving.settings import Settings

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
LAST = GET % b"Connection: close\r\n"
Port = int
LIMIT = 120.0  # seconds: what waits so long has failed, however busy the machine


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    with pytest.MonkeyPatch.context() as patch, served() as client, listening(client) as address:
        patch.setattr(run, "LINGER", LIMIT)  # a client that sends slowly still reads why it is refused
        yield port_of(address)


def port_of(address: str) -> Port:
    return int(address.rstrip("/").rpartition(":")[2])


def said(port: Port, parts: Iterable[bytes]) -> bytes:
    """All that the server says until it closes the connection."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                link.sendall(part)
            while piece := link.recv(65536):
                heard += piece
        except (BrokenPipeError, ConnectionResetError):  # it had closed before all was sent
            pass
    return heard


def error(answer: bytes) -> tuple[int, str]:
    """Status and code of an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "sent",
    [
        b"what is this\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS
    ],
)
def test_what_is_no_http_is_400_in_the_api_s_own_words(port: Port, sent: bytes) -> None:
    assert error(said(port, [sent])) == (400, "invalid_http")


@pytest.mark.parametrize("line", [b"X-%d: a\r\n", b"X-%d: " + b"a" * 1000 + b"\r\n"])
def test_ten_thousand_headers_are_431(port: Port, line: bytes) -> None:
    headers = [line % i for i in range(10_000)]
    assert error(said(port, [GET % b"".join([*headers, b"Connection: close\r\n"])])) == (431, "too_large")


def test_a_head_without_end_is_431(port: Port) -> None:
    begins = b"GET / HTTP/1.1\r\nX: "
    assert error(said(port, [begins, b"a" * MAX_HEAD])) == (431, "too_large")


def test_garbage_behind_a_request_disturbs_no_answer(port: Port) -> None:
    heard = said(port, [GET % b"" + b"garbage\r\n\r\n"])
    answer, _, refusal = heard.rpartition(b"HTTP/1.1 ")
    assert answer.startswith(b"HTTP/1.1 200 ") and error(b"HTTP/1.1 " + refusal) == (400, "invalid_http")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["object"] == "list"


def test_a_bad_request_behind_another_does_not_take_its_answer(port: Port) -> None:
    bad = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"
    for ahead in (1, 2):
        heard = said(port, [GET % b"" * ahead + bad])
        assert heard.count(b"HTTP/1.1 200 ") == heard.count(b'"object":"list"') == ahead
        assert heard.count(b"HTTP/1.1 400 ") == 1 and heard.endswith(b'"invalid_http"}}')


def test_what_follows_garbage_does_not_reset_the_answer(port: Port) -> None:
    heard = said(port, [GET % b"" + b"garbage\r\n\r\n", b"x" * 4096])
    assert heard.startswith(b"HTTP/1.1 200 ") and b'"object":"list"' in heard


@pytest.mark.parametrize("cut", [None, 0, 3])
def test_a_body_is_never_taken_for_a_request(port: Port, cut: int | None) -> None:
    """`cut`: characters of the header that come in the first part; None: blank lines come before the request."""
    body = GET % b""
    offer = b"Content-Length: %d\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n" % len(body)
    asked = GET.replace(b"GET /v1/models", b"POST /v1/tokenize") % offer + body
    at = asked.index(b"Upgrade: h2c") + (cut or 0)
    heard = said(port, [b"\r\n\r\n" + asked] if cut is None else [asked[:at], asked[at:]])
    assert b'"object":"list"' not in heard and heard.count(b"HTTP/1.1 ") == 1 and heard.startswith(b"HTTP/1.1 4")


def test_requests_may_follow_each_other_at_once(port: Port) -> None:
    heard = said(port, [(GET % b"") * 8 + LAST])
    assert heard.count(b"HTTP/1.1 200 ") == heard.count(b'"object":"list"') == 9


def test_a_request_may_come_byte_by_byte(port: Port) -> None:
    assert said(port, (bytes([byte]) for byte in LAST)).startswith(b"HTTP/1.1 200 ")


def test_head_is_get_without_the_body(port: Port) -> None:
    heard = said(port, [LAST.replace(b"GET", b"HEAD")])
    assert heard.startswith(b"HTTP/1.1 200 ") and heard.endswith(b"\r\n\r\n") and b"content-length" in heard


def test_other_methods_are_told_which_there_are(port: Port) -> None:
    heard = said(port, [LAST.replace(b"GET", b"OPTIONS")])
    assert error(heard)[0] == 405 and b"\r\nallow: GET\r\n" in heard


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_an_upgrade_is_answered_in_http(port: Port, upgrade: bytes) -> None:
    offer = b"Upgrade: %s\r\nConnection: Upgrade, close\r\nSec-WebSocket-Key: a\r\n" % upgrade
    assert said(port, [GET % offer]).startswith(b"HTTP/1.1 200 ")
    body = b'{"model": "tiny", "prompt": "2 + 3"}'
    more = offer + b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    asked = GET.replace(b"GET /v1/models", b"POST /v1/tokenize") % more + body
    for parts in ([asked], [asked[:-9], asked[-9:]], [asked[:99], asked[99:]]):
        assert said(port, parts).startswith(b"HTTP/1.1 200 "), parts


def test_an_upgrade_may_come_in_two_packets(port: Port) -> None:
    asked = GET % b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n"
    at = asked.index(b"Upgrade: h2c") + 3
    assert said(port, [asked[:at], asked[at:]]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("hosts", [0, 2])
def test_a_request_names_its_host_once(port: Port, hosts: int) -> None:
    asked = b"GET /v1/models HTTP/1.1\r\n%s\r\n" % (b"Host: localhost\r\n" * hosts)
    assert error(said(port, [asked])) == (400, "invalid_http")


def test_a_body_may_come_in_chunks(port: Port) -> None:
    more = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    asked = GET.replace(b"GET /v1/models", b"POST /v1/tokenize") % more
    body = b'{"model": "tiny", "prompt": "2 + 3"}'
    heard = said(port, [asked, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"])
    assert heard.startswith(b"HTTP/1.1 200 ") and b'"tokens"' in heard


@pytest.mark.parametrize("length", [1_000_000, 10**9], ids=["too slow", "too large"])
def test_a_body_comes_in_bounded_time(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that each come in time do not make a body in time; and what is refused need not be heard to its end."""
    asked, heard = GET.replace(b"GET /v1/models", b"POST /v1/tokenize") % (b"Content-Length: %d\r\n" % length), b""
    monkeypatch.setattr(run, "LINGER", LIMIT)
    with (
        served(Settings(send_timeout=0.2)) as client, listening(client) as address,
        socket.create_connection(("127.0.0.1", port_of(address)), timeout=LIMIT) as link,
    ):  # fmt: skip
        link.sendall(asked)
        while not select.select([link], [], [], 0.05)[0]:  # it is answered while it still sends
            link.sendall(b" ")
        while piece := link.recv(65536):
            heard += piece
    assert error(heard) == ((408, "timeout") if length < 10**9 else (413, "too_large"))


def test_a_compressed_body_is_refused_so(port: Port) -> None:
    more = b"Content-Encoding: gzip\r\nContent-Length: 2\r\nConnection: close\r\n"
    heard = said(port, [GET.replace(b"GET /v1/models", b"POST /v1/tokenize") % more + b"\x1f\x8b"])
    assert error(heard)[0] == 415 and b"compressed (gzip)" in heard


def test_an_old_client_is_answered(port: Port) -> None:
    heard = said(port, [b"GET /v1/models HTTP/1.0\r\n\r\n"])
    assert heard.startswith(b"HTTP/1.1 200 ") and json.loads(heard.partition(b"\r\n\r\n")[2])["object"] == "list"


@pytest.mark.parametrize("head", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", LAST.replace(b"HTTP/1.1", b"HTTP/2.0")])
def test_a_client_that_speaks_http_2_at_once_is_told_so(port: Port, head: bytes) -> None:
    assert error(said(port, [head])) == (505, "invalid_http")


def test_a_long_name_is_cut_in_the_answer(port: Port) -> None:
    for path in (b"/v1/models/", b"/nowhere/"):
        heard = said(port, [LAST.replace(b"/v1/models", path + b"a" * 60_000)])
        assert error(heard)[0] == 404 and len(heard) < 2000
