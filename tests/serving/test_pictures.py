"""Images in requests: each API takes the same picture, and what is refused names the client's own field."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.images import llada_v, picture, png, save_llada_v, save_seeing, seeing
from support.serving import Client, served

import dinfer
from dinfer.serving.settings import Settings

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
DATA = base64.b64encode(png(picture(0))).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = {CHAT: {"type": "text", "text": "w5"}, RESPONSES: {"type": "input_text", "text": "w5"}}
SAMPLING = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = save_seeing(seeing(), tmp_path_factory.mktemp("seeing"))
    pipe = dinfer.load(str(folder), device="cpu", iteration={"block": 6}, decoder={"steps": 4})
    with served(Settings(), pipe) as found:
        yield found


def body(path: str, *images: dict[str, Any], **more: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": [TEXT.get(path, TEXT[CHAT]), *images]}
    if path == RESPONSES:
        return {"model": "tiny", "input": [turn], "temperature": 0, "max_output_tokens": 12} | more
    return {"model": "tiny", "messages": [turn]} | SAMPLING | more


PARTS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
    RESPONSES: {"type": "input_image", "image_url": URL},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
}


def test_each_api_takes_a_picture_as_python_does(client: Client) -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "image", "image": picture(0)}]
    want = client.pipe.generate([{"role": "user", "content": parts}], max_new_tokens=12, temperature=0)
    answer = client.ask(CHAT, body(CHAT, PARTS[CHAT])).json()
    assert answer["choices"][0]["message"]["content"] == want.text
    assert answer["usage"]["prompt_tokens"] == len(want.prompt_ids)
    message = client.ask(MESSAGES, body(MESSAGES, PARTS[MESSAGES])).json()
    assert message["usage"]["input_tokens"] == len(want.prompt_ids) and message["content"][0]["text"] == want.text
    counted = client.ask(
        f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": body(MESSAGES, PARTS[MESSAGES])["messages"]}
    )
    assert counted.json() == {"input_tokens": len(want.prompt_ids)}
    response = client.ask(RESPONSES, body(RESPONSES, PARTS[RESPONSES])).json()
    assert response["usage"]["input_tokens"] == len(want.prompt_ids)
    assert client.ask("/tokenize", {"model": "tiny", "messages": body(CHAT, PARTS[CHAT])["messages"]}).json()[
        "count"
    ] == len(want.prompt_ids)
    asked = body(CHAT, PARTS[CHAT])["messages"]
    read = client.ask("/v1/read", {"model": "tiny", "messages": asked, "choice": ["w2", "w3"]}).json()
    said = client.pipe.read([{"role": "user", "content": parts}], choice=["w2", "w3"]).slots["choice"]
    assert read["slots"]["choice"]["probabilities"]["w2"] == pytest.approx(said.probabilities["w2"], abs=1e-5)
    other = client.ask(CHAT, body(CHAT, {"type": "image_url", "image_url": {"url": URL}}, PARTS[CHAT], n=2)).json()
    assert len(other["choices"]) == 2 and other["usage"]["prompt_tokens"] > 2 * 40


def test_pictures_of_llada_v_take_the_positions_that_python_says(tmp_path: Path) -> None:
    """One alone is cut into tiles, two are not."""
    pipe = dinfer.load(str(save_llada_v(llada_v(), tmp_path)), device="cpu")
    parts = [{"type": "image", "image": picture(0)}, {"type": "text", "text": "w5"}]
    with served(Settings(), pipe) as client:
        for images in (1, 2):
            want = pipe.generate([{"role": "user", "content": parts[:1] * images + parts[1:]}], max_new_tokens=12)
            sent = [PARTS[CHAT]] * images + [TEXT[CHAT]]
            answer = client.ask(CHAT, body(CHAT) | {"messages": [{"role": "user", "content": sent}]}).json()
            assert answer["choices"][0]["message"]["content"] == want.text
            assert answer["usage"]["prompt_tokens"] == len(want.prompt_ids)


CUT = f"data:image/png;base64,{base64.b64encode(png(picture(0))[:-300]).decode()}"
WRONG = {
    "address": (CHAT, {"url": "https://example.org/a.png"}, "messages.0.content.1.image_url", "nothing is fetched"),
    "file": (CHAT, {"url": "file:///etc/passwd"}, "messages.0.content.1.image_url", "nothing is fetched"),
    "path": (CHAT, {"url": "/etc/passwd"}, "messages.0.content.1.image_url", "nothing is fetched"),
    "detail": (CHAT, {"url": URL, "detail": "high"}, "messages.0.content.1.detail", "send 'auto'"),
    "base64": (CHAT, {"url": URL + "!"}, "messages.0.content.1.image_url", "is not base64"),
    "cut": (CHAT, {"url": CUT}, "messages.0.content.1.image_url", "damaged or cut off"),
    "nothing": (CHAT, None, "messages.0.content.1.image_url", "must be a data: URL"),
    "responses": (RESPONSES, "https://a/b.png", "input.0.content.1.image_url", "nothing is fetched"),
    "cut response": (RESPONSES, CUT, "input.0.content.1.image_url", "damaged or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_picture_is_refused_by_the_name_of_its_field(client: Client, name: str) -> None:
    path, given, field, message = WRONG[name]
    answer = client.ask(
        path, body(path, {"type": "input_image" if path == RESPONSES else "image_url", "image_url": given})
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and message in error["message"], error
    assert DATA[:40] not in answer.text


def test_anthropics_sources_of_other_kinds_are_refused(client: Client) -> None:
    for source, what in (({"type": "url", "url": "https://a/b.png"}, "source.type"), ({"type": "base64"}, "source")):
        answer = client.ask(MESSAGES, body(MESSAGES, {"type": "image", "source": source}))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"messages.0.content.1.{what}")


def test_too_many_images_and_those_of_others_are_refused(client: Client) -> None:
    answer = client.ask(CHAT, body(CHAT, *[PARTS[CHAT]] * 9)).json()["error"]
    assert "a request has 9 images, and 8 is the most" in answer["message"]
    turn = {"role": "system", "content": [PARTS[CHAT]]}
    answer = client.ask(CHAT, body(CHAT) | {"messages": [turn]}).json()["error"]
    assert answer["param"] == "messages.0.content.0" and "only the user's" in answer["message"]
    answer = client.ask("/v1/trace", body(CHAT, PARTS[CHAT])).json()["error"]
    assert "which a trace does not show" in answer["message"]
    answer = client.ask(CHAT, body(CHAT, PARTS[CHAT], prompt_logprobs=1)).json()["error"]
    assert answer["param"] == "prompt_logprobs"
    answer = client.ask(CHAT, body(CHAT, PARTS[CHAT], truncate_prompt_tokens=20)).json()["error"]
    assert "without an image" in answer["message"]


def test_a_model_without_a_tower_says_so() -> None:
    with served() as client:
        answer = client.ask(CHAT, body(CHAT, PARTS[CHAT])).json()["error"]
    assert answer["param"] == "messages.0.content.1.image_url"
    assert "models of the family llada take no images: send text alone" in answer["message"]


def test_a_long_text_beside_a_picture_is_no_fault_of_a_model_without_a_tower() -> None:
    """Such a text is written out to learn its length, by a template that knows texts alone."""
    with served() as client:
        turn = {"role": "user", "content": [{"type": "text", "text": "a" * 1_000_000}, PARTS[CHAT]]}
        response = client.ask(CHAT, body(CHAT) | {"messages": [turn]})
    assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]
