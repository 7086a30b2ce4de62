"""What users of transformers and vLLM write works, or ends in a sentence that says what to write."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import dinfer
from dinfer.core.pipeline.tokenizer import tell_once

QUESTION = "Start with 14: add 23. What is the result?"


@pytest.fixture(scope="module")
def pipe() -> dinfer.Pipeline:
    return dinfer.load("tiny")


def test_options_n_stop_and_tools_are_keywords(pipe: dinfer.Pipeline) -> None:
    drawn = {"temperature": 2.0, "top_p": 0.99, "seed": 1, "max_new_tokens": 16}
    four = pipe.generate(QUESTION, n=4, stop=["\n"], **drawn)
    assert len(four) == 4 and not any("\n" in one.text for one in four)
    again = [
        pipe.generate(QUESTION, options={"temperature": 2.0, "top_p": 0.99, "seed": 1 + i}, max_new_tokens=16)
        for i in range(4)
    ]
    assert [one.text for one in four] == [one.text.split("\n")[0] for one in again]
    assert len({tuple(one.canvas) for one in four}) > 1
    pairs = pipe.generate([QUESTION] * 2, n=2, max_new_tokens=8, progress=True)
    assert [len(pair) for pair in pairs] == [2, 2]
    assert "".join(pipe.stream(QUESTION, **drawn)) == again[0].text


def test_options_of_a_family_go_with_a_name_or_a_folder(pipe: dinfer.Pipeline) -> None:
    """As on the command line: `model=FOLDER model.stop_ids=[3]`."""
    assert pipe.origin is not None
    for name in ("tiny", str(pipe.origin[1])):
        own = dinfer.load({"name": name, "stop_ids": [3]})
        assert own.recipe.parts == pipe.recipe.parts and own.model.spec.stop_ids == (*pipe.model.spec.stop_ids, 3)
    with pytest.raises(ValueError, match="unknown option of model 'llada': 'blok'"):
        dinfer.load({"name": "tiny", "blok": 16})
    with pytest.raises(ValueError, match="unknown model 'tny'"):
        dinfer.load({"name": "tny", "block": 16})


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"max_tokens": 5}, "generate takes no max_tokens: use max_new_tokens"),
        ({"do_sample": True}, "temperature=0.7 draws"), ({"block_length": 32}, "give load iteration="),
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"stop": [""]}, "none of them empty"), ({"n": 0}, "n=0 must be at least 1"),
        ({"temperature": 1.0, "options": {"temperature": 0.5}}, "temperature is given by keyword and in options"),
        ({"max_new_tokens": 10**6}, r"^(?!prompt 0)"),
    ],
)  # fmt: skip
def test_other_names_say_what_to_write(pipe: dinfer.Pipeline, given: dict[str, Any], remedy: str) -> None:
    with pytest.raises((TypeError, ValueError), match=remedy):
        pipe.generate(QUESTION, **given)


def test_other_names_of_load_and_stream_do_too(pipe: dinfer.Pipeline) -> None:
    for given, remedy in (({"torch_dtype": "auto"}, "use dtype"), ({"device_map": "auto"}, "use device"),
                          ({"trust_remote_code": True}, "never run"), ({"revision": "main"}, "'revision': REVISION"),
                          ):  # fmt: skip
        with pytest.raises(TypeError, match=remedy):
            dinfer.load("tiny", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="or quantize= to round"):
        dinfer.load("tiny", dtype="fp8")
    with pytest.raises(TypeError, match="stream takes no n: only generate does"):
        pipe.stream(QUESTION, n=3)
    with pytest.raises(ValueError, match="a prompt is a text, a list of messages, or a list of such prompts, not None"):
        pipe.generate(None)


def test_mistakes_say_what_would_be_right(caplog: pytest.LogCaptureFixture) -> None:
    pipe = dinfer.load("tiny", device="cpu")
    positions = pipe.model.spec.max_length
    prompt = len(pipe.encode("one two"))
    with pytest.raises(ValueError, match=f"shorten the prompt or ask for at most {positions - prompt}$"):
        pipe.generate("one two", max_new_tokens=positions)
    library = logging.getLogger("transformers")  # its messages do not reach the root
    library.addHandler(caplog.handler)
    with pytest.raises(ValueError, match=r"positions: shorten the prompt$"):
        pipe.generate("one " * 2000, max_new_tokens=8)
    library.removeHandler(caplog.handler)
    assert "Token indices sequence length" not in caplog.text
    with pytest.raises(ValueError, match=r"Known: .*tiny, tiny-d2f, tiny-json"):
        dinfer.load("./nofolder", device="cpu")


def test_a_system_message_that_the_template_leaves_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tell_once.cache_clear()
    pipe = dinfer.load("tiny", device="cpu")
    for _ in range(2):
        pipe.encode([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert caplog.text.count("chat template leaves system messages out") == 1
