"""What clients send beside a conversation: neutral values pass, and the rest does what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from support.serving import QUESTION, Client, pieces, served

import dinfer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}
SECRET = "the prompt that no proxy may log"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served() as found:
        yield found


def chat(client: Client, **fields: Any) -> httpx.Response:
    return client.ask(CHAT, ASK | fields)


def test_values_that_ask_for_nothing_change_nothing(client: Client) -> None:
    neutral: dict[str, Any] = {
        "top_k": -1, "top_p": 1, "repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "frequency_penalty": 0,
        "presence_penalty": 0.0, "logit_bias": {}, "bad_words": [], "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "add_generation_prompt": True, "use_beam_search": False, "priority": 0,
        "length_penalty": 1, "stop_token_ids": [], "chat_template_kwargs": {}, "metadata": {"a": "b"}, "n": 1,
        "tools": [{"type": "function"}], "tool_choice": "none", "stop": None, "seed": None, "stream": None,
        "stream_options": None, "logprobs": None, "top_logprobs": None, "what_comes_next_year": None,
    }  # fmt: skip
    answers = [chat(client, **fields).json()["choices"] for fields in ({}, neutral, {"top_k": 0})]
    assert answers[0] == answers[1] == answers[2]


def test_hints_that_clients_always_send_are_accepted(client: Client) -> None:
    parts = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    now = {"type": "function", "function": {"name": "now"}, "cache_control": {"type": "ephemeral"}}
    hints: dict[str, Any] = {
        "reasoning_effort": "low", "verbosity": "high", "store": True, "metadata": {"a": "b"}, "cache_control": {},
        "chat_template_kwargs": {"enable_thinking": False}, "messages": [{"role": "user", "content": parts}],
    }  # fmt: skip
    assert chat(client, **hints).json()["choices"] == chat(client).json()["choices"]
    assert chat(client, **hints, tools=[now]).status_code == 200
    turns = [{"role": "user", "content": None}, *ASK["messages"]]
    assert chat(client, messages=turns).status_code == 200


def test_the_chat_template_gets_its_variables_and_no_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "{{ enable_thinking }} {{ reasoning_effort }} {{ verbosity }} {{ messages[-1].content }}"
    monkeypatch.setattr(client.pipe.tokenizer, "chat_template", told)
    ask, end = {"model": "tiny", "messages": ASK["messages"]}, client.pipe.tokenizer.eos_token

    def written(path: str, **fields: Any) -> str:
        body = client.ask(path, ask | fields).json()
        ids = body.get("tokens") or body["prompt_token_ids"]
        return client.pipe.tokenizer.decode(ids).removesuffix(QUESTION).strip()

    own = {"enable_thinking": False, "verbosity": "x" + end, "unread": [1, {"a": None}]}
    assert written("/tokenize", chat_template_kwargs=own).split() == ["False", "x" + end]
    ids = client.ask("/tokenize", ask | {"chat_template_kwargs": own}).json()["tokens"]
    assert client.pipe.model.spec.eos_id not in ids, "a text may spell a special token, and stays a text"
    chats = {"return_token_ids": True, "max_tokens": 1}
    assert written(CHAT, **chats, reasoning_effort="none", verbosity="low").split() == ["False", "none", "low"]
    assert written(CHAT, **chats, reasoning_effort="high").split() == ["True", "high"]
    for values in ({"tools": []}, {"tokenize": True}, {"enable_thinking": "x" * 20_000}):
        assert chat(client, chat_template_kwargs=values).json()["error"]["param"] == "chat_template_kwargs"


def test_a_seed_has_64_bits_and_choices_may_be_many(client: Client) -> None:
    drawn = [chat(client, temperature=1.0, seed=seed).json()["choices"] for seed in (-1, -1, -(2**63), 2**63 - 1)]
    assert drawn[0] == drawn[1] and len({json.dumps(one) for one in drawn}) > 1
    assert chat(client, seed=2**63).status_code == 400
    assert chat(client, temperature=1.0, random_seed=-1, safe_prompt=False).json()["choices"] == drawn[0]
    assert len(chat(client, n=20, max_tokens=2).json()["choices"]) == 20
    assert chat(client, n=129).json()["error"]["param"] == "n"


def test_a_message_comes_back_as_it_was_sent(client: Client) -> None:
    said = {"role": "assistant", "content": "9", "reasoning_content": None, "tool_calls": [], "annotations": None}
    turns = [*ASK["messages"], said, {"role": "user", "content": "And what is 2 + 3?", "name": "Tom"}]
    assert chat(client, messages=turns).status_code == 200
    called = chat(client, messages=[*ASK["messages"], {"role": "assistant", "function_call": {"name": "f"}}])
    assert called.status_code == 400 and "function_call" in called.json()["error"]["message"]


def test_a_message_may_be_continued(client: Client) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "Tom has"}]
    ids = client.ask("/tokenize", {"model": "tiny", "messages": turns, "continue_final_message": True}).json()["tokens"]
    assert client.ask("/detokenize", {"model": "tiny", "tokens": ids}).json()["prompt"].endswith("Tom has")
    assert chat(client, messages=turns, continue_final_message=True).json()["usage"]["prompt_tokens"] == len(ids)
    marked = [*ASK["messages"], {"role": "assistant", "content": "Tom has", "prefix": True}]  # as Mistral's clients do
    assert chat(client, messages=marked).json()["usage"]["prompt_tokens"] == len(ids)
    early = chat(client, messages=[*marked, *ASK["messages"]])
    assert early.status_code == 400 and early.json()["error"]["param"] == "messages.1.prefix"
    both = chat(client, messages=turns, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "continue_final_message"


def test_a_chat_echoes_the_message_that_it_continues(client: Client) -> None:
    said = {"role": "assistant", "content": "Tom has"}
    ask: dict[str, Any] = {"messages": [*ASK["messages"], said], "continue_final_message": True, "n": 2}
    plain, echoed = (chat(client, **ask, echo=echo, logprobs=True).json() for echo in (False, True))
    for one, other in zip(plain["choices"], echoed["choices"], strict=True):
        assert other["message"]["content"] == "Tom has" + one["message"]["content"]
        assert other["logprobs"] == one["logprobs"]
    told = [piece["choices"][0] for piece in pieces(chat(client, **ask, echo=True, stream=True))]
    for row in range(2):
        text = "".join(one["delta"].get("content", "") for one in told if one["index"] == row)
        assert text == echoed["choices"][row]["message"]["content"]
    assert chat(client, echo=True).json()["choices"] == chat(client).json()["choices"], "the last message is the user's"
    assert chat(client, **ask, echo=True, regex="a+").json()["error"]["param"] == "echo"


def test_stop_tokens_and_stop_strings_end_an_answer_and_say_so(client: Client) -> None:
    whole = chat(client, return_token_ids=True, max_tokens=64).json()["choices"][0]
    assert whole["matched_stop"] == client.pipe.model.spec.eos_id and whole["finish_reason"] == "stop"
    ids, text = whole["token_ids"], whole["message"]["content"]
    at = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    cut = chat(client, stop_token_ids=[ids[at]], return_token_ids=True).json()["choices"][0]
    assert (cut["token_ids"], cut["matched_stop"], cut["finish_reason"]) == (ids[: at + 1], ids[at], "stop")
    kept = chat(client, stop_token_ids=[ids[at]], return_token_ids=True, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["token_ids"] == ids[: at + 1]
    word = text.split()[3]
    ended = chat(client, stop=word, include_stop_str_in_output=True).json()["choices"][0]
    assert ended["message"]["content"] == text[: text.find(word) + len(word)] and ended["matched_stop"] == word


def test_an_answer_has_at_least_min_tokens(client: Client) -> None:
    usual = chat(client, max_tokens=64).json()["usage"]["completion_tokens"]
    longer = chat(client, max_tokens=64, min_tokens=usual + 5).json()["usage"]["completion_tokens"]
    assert usual + 5 <= longer <= 64
    ids = chat(client, return_token_ids=True).json()["choices"][0]["token_ids"]
    for fields in ({"stop": " "}, {"stop_regex": "."}, {"stop_token_ids": ids[:1]}):
        found = chat(client, min_tokens=len(ids) - 1, return_token_ids=True, **fields).json()["choices"][0]["token_ids"]
        assert found[: len(ids) - 1] == ids[:-1]


def test_token_ids_hold_what_ended_the_answer_as_vllm_has_them(client: Client) -> None:
    end, ask = client.pipe.model.spec.eos_id, {"return_token_ids": True, "max_tokens": 64, "logprobs": True}

    def both(**fields: Any) -> dict[str, Any]:
        (whole,) = chat(client, **ask | fields).json()["choices"]
        told = [piece["choices"][0] for piece in pieces(chat(client, **ask | fields, stream=True))]
        assert [token for one in told for token in one.get("token_ids", [])] == whole["token_ids"]
        scores = [entry for one in told if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert scores == whole["logprobs"]["content"] and len(scores) == len(whole["token_ids"])
        assert all(entry["logprob"] <= 0 for entry in scores)
        return whole

    usual = both()
    *ids, last = usual["token_ids"]
    text, decode = usual["message"]["content"], client.pipe.decode
    assert last == end and end not in ids and decode(ids) == text
    plain = chat(client, max_tokens=64, logprobs=True).json()
    assert len(plain["choices"][0]["logprobs"]["content"]) == len(ids) == plain["usage"]["completion_tokens"]
    word = text.split()[3]
    for fields in ({"stop": word}, {"stop_regex": word}):
        found = both(**fields)
        assert decode(found["token_ids"][:-1]) in text[: text.find(word) + len(word) - 1]
        assert word in decode(found["token_ids"]) and found["token_ids"] == ids[: len(found["token_ids"])]
    assert len(both(max_tokens=4)["token_ids"]) == 4 and both(max_tokens=4)["finish_reason"] == "length"
    assert end in both(ignore_eos=True)["token_ids"][len(ids) :]
    *held, last = both(regex="[0-9]{2}")["token_ids"]
    assert last == end and decode(held).isdigit()


def test_tokens_are_ruled_out_or_preferred(client: Client) -> None:
    usual = chat(client, return_token_ids=True).json()["choices"][0]
    ids, card = usual["token_ids"], client.pipe.model.spec

    def found(**fields: Any) -> list[int]:
        return chat(client, return_token_ids=True, **fields).json()["choices"][0]["token_ids"]

    assert ids[3] not in found(logit_bias={str(ids[3]): -100}) and ids[3] in ids
    assert set(found(logit_bias={str(ids[3]): 100})) == {ids[3]}
    assert set(found(allowed_token_ids=ids[2:6])) <= set(ids[2:6])
    assert "books" in usual["message"]["content"]
    assert "books" not in chat(client, bad_words=["books"]).json()["choices"][0]["message"]["content"]
    assert found() == ids, "a slot keeps the bias of an earlier request"
    for fields, name in (({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {str(card.vocab): 1}}, "logit_bias"),
                         ({"logit_bias": {"1": 101}}, "logit_bias.1"), ({"allowed_token_ids": []}, "allowed_token_ids"),
                         ({"bad_words": ["of many tokens"]}, "bad_words")):  # fmt: skip
        assert chat(client, **fields).json()["error"]["param"] == name


def test_a_gap_before_a_suffix_is_filled(client: Client) -> None:
    before, behind = "Tom has 12 coins and buys 3", " at 2 coins each. So he pays 6 coins."
    ask = {"model": "tiny", "prompt": before, "suffix": behind, "max_tokens": 4}
    whole = client.ask("/v1/fim/completions", ask).json()
    filled = client.ask("/v1/infill", {"model": "tiny", "text": f"{before}[MASK:4]{behind}"}).json()
    (text,) = filled["gaps"]
    (choice,) = whole["choices"]
    assert text.startswith(choice["text"]) and whole["usage"]["prompt_tokens"] == filled["usage"]["prompt_tokens"]
    told = [piece["choices"][0] for piece in pieces(client.ask(TEXT, ask | {"stream": True}))]
    assert "".join(one["text"] for one in told) == choice["text"]
    assert told[-1]["finish_reason"] == choice["finish_reason"]
    assert choice["message"]["content"] == choice["text"] and "message" not in client.ask(TEXT, ask).text  # Mistral's
    told = [piece["choices"][0] for piece in pieces(client.ask("/v1/fim/completions", ask | {"stream": True}))]
    assert "".join(one["delta"].get("content", "") for one in told) == choice["text"]
    none, plain = (client.ask(TEXT, ask | {"suffix": text}).json()["choices"] for text in ("<|endoftext|>", ""))
    assert none == plain != whole["choices"]
    long = client.ask(TEXT, ask | {"max_tokens": 4000, "n": 2, "temperature": 1.0, "random_seed": 3, "prompt": ""})
    assert len(long.json()["choices"]) == 2 and long.json()["usage"]["completion_tokens"] <= 2 * 256
    held = client.ask(TEXT, ask | {"regex": " (coin|book)s"}).json()["choices"][0]
    assert held["text"] in (" coins", " books") and held["finish_reason"] == "stop"
    for fields, name in (
        ({"echo": True}, "echo"), ({"prompt": [1]}, "suffix"), ({"dinfer": {"gap": 300}}, "prompt"),
        ({"suffix": "", "dinfer": {"gap": 3}}, "dinfer.gap"), ({"random_seed": 1, "seed": 2}, "random_seed"),
    ):  # fmt: skip
        assert client.ask(TEXT, ask | fields).json()["error"]["param"] == name
    for field in ("prompt", "suffix"):  # more bytes than its tokens can have
        error = client.ask(TEXT, ask | {field: "a" * 10_000}).json()["error"]
        assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    with served(pipe=dinfer.load("tiny-llada2", device="cpu", runtime=dinfer.Runtime(rows=2))) as causal:
        refused = causal.ask(TEXT, ask).json()["error"]
        assert refused["param"] == "suffix" and "without having seen" in refused["message"]


def test_token_ids_come_with_answers_and_streams(client: Client) -> None:
    whole = client.ask(TEXT, {"model": "tiny", "prompt": QUESTION, "max_tokens": 16, "return_token_ids": True}).json()
    (choice,) = whole["choices"]
    assert len(choice["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert (
        client.ask("/detokenize", {"model": "tiny", "tokens": choice["token_ids"]}).json()["prompt"] == choice["text"]
    )
    streamed = client.ask(TEXT, {
        "model": "tiny", "prompt": QUESTION, "max_tokens": 16, "return_token_ids": True, "stream": True,
    })  # fmt: skip
    told = [piece["choices"][0] for piece in pieces(streamed)]
    assert [token for one in told for token in one.get("token_ids", [])] == choice["token_ids"]
    assert [one["prompt_token_ids"] for one in told if "prompt_token_ids" in one] == [choice["prompt_token_ids"]]
    echo = {"model": "tiny", "prompt": QUESTION, "max_tokens": 16, "return_token_ids": True, "echo": True}
    (echoed,) = client.ask(TEXT, echo).json()["choices"]
    assert echoed["token_ids"] == choice["token_ids"], "the prompt's stand in prompt_token_ids alone"
    told = [piece["choices"][0] for piece in pieces(client.ask(TEXT, echo | {"stream": True}))]
    assert [token for one in told for token in one.get("token_ids", [])] == choice["token_ids"]


def test_log_probabilities_hold_the_chosen_token(client: Client) -> None:
    ask = {"model": "tiny", "prompt": QUESTION, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    for top in (0, 2):
        scores = client.ask(TEXT, ask | {"logprobs": top}).json()["choices"][0]["logprobs"]
        for token, logprob, best in zip(
            *(scores[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert best[token] == logprob and len(best) <= top + 1
    named = client.ask(TEXT, ask | {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True})
    (choice,) = named.json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_log_probabilities_of_tokens_that_a_request_names(client: Client) -> None:
    ask = ASK | {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
    usual = chat(client, **ask).json()["choices"][0]["logprobs"]["content"]
    known = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in usual]
    ids = [int(name.removeprefix("token_id:")) for name in [*known[0]][4::7]]
    body = ask | {"logprob_token_ids": [ids[0], *ids], "top_logprobs": None}

    async def both() -> list[httpx.Response]:  # in one step, and each is told of its own
        return await asyncio.gather(*(client.http.post(CHAT, json=one) for one in (body, ask)))

    named, other = (one.json()["choices"][0]["logprobs"]["content"] for one in client.loop.run(both()))
    assert other == usual
    for entry, best in zip(named, known, strict=True):
        told = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert {*told} == {entry["token"], *(f"token_id:{one}" for one in ids)} and told[entry["token"]] == entry[
            "logprob"
        ]
        assert all(told[name] == pytest.approx(best[name], abs=1e-5) for name in told.keys() & best.keys())
    streamed = pieces(chat(client, **body, stream=True))
    assert [e for p in streamed if (s := p["choices"][0]["logprobs"]) for e in s["content"]] == named
    text = {"model": "tiny", "prompt": QUESTION, "max_tokens": 2, "logprob_token_ids": ids}
    scores = client.ask(TEXT, text | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert all(
        own in best and len(best) in (3, 4)
        for own, best in zip(*map(scores.get, ("tokens", "top_logprobs")), strict=True)
    )
    for path, wrong, why in (
        (TEXT, text, "needs logprobs"),
        (TEXT, text | {"logprobs": 1, "echo": True}, "echo=false"),
        (CHAT, ask | {"logprob_token_ids": [9**9]}, "outside the vocabulary"),
        (CHAT, ask | {"logprob_token_ids": [*range(21)]}, "at most 20"),
    ):
        error = client.ask(path, wrong).json()["error"]
        assert error["param"] == "logprob_token_ids" and why in error["message"], error


def test_an_answer_ends_with_the_first_match_of_an_expression(client: Client) -> None:
    whole = chat(client).json()["choices"][0]["message"]["content"]
    for patterns, matched, end in (
        (r"\d\d [+*]", r"\d\d [+*]", "The books cost 12 *"),
        (["never", r"\n\d"], r"\n\d", whole[: whole.index("\n") + 2]),
        (["=$", "46"], "=$", "The books cost 12 * 2 ="),
        ("NOBODY|^books", None, whole),
    ):
        choice = chat(client, stop_regex=patterns, stop="never").json()["choices"][0]
        assert (choice["message"]["content"], choice["matched_stop"]) == (end, matched)
        assert choice["finish_reason"] == ("length" if matched is None else "stop")
        told = [one["choices"][0] for one in pieces(chat(client, stop_regex=patterns, stream=True))]
        assert "".join(one["delta"].get("content") or "" for one in told) == end
        assert told[-1]["finish_reason"] == choice["finish_reason"]
    for wrong, why in (
        ("a*", "empty text"), ("a^b", "no text"), ("(?=a)b", "lookahead"), ("[", "ends within"), ("a.{40}", "states"),
    ):  # fmt: skip
        error = chat(client, stop_regex=wrong).json()["error"]
        assert error["param"].startswith("stop_regex") and why in error["message"], error
    error = chat(client, stop_regex="a", regex="a+").json()["error"]
    assert error["param"] == "stop_regex" and "contradicts regex" in error["message"]


def test_only_requests_of_one_salt_share_keys() -> None:
    pipe = dinfer.load("tiny-llada2", device="cpu", runtime=dinfer.Runtime(rows=4, share=True, max_length=256))
    with served(pipe=pipe) as client:

        def cached(**salt: str) -> int:
            ask = {"model": "tiny", "prompt": f"{QUESTION} {QUESTION}", "max_tokens": 4} | salt
            return int(client.ask(TEXT, ask).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert not cached() and cached()
        assert not cached(cache_salt="one") and not cached(cache_salt="two")
        assert cached(cache_salt="one") and cached(cache_salt="two") and cached()
        ask = {"input": f"{QUESTION} {QUESTION}", "max_output_tokens": 4}
        told = [client.ask("/v1/responses", ask | {"cache_salt": salt}).json()["usage"] for salt in "aab"]
        assert [one["input_tokens_details"]["cached_tokens"] > 0 for one in told] == [False, True, False]
        error = client.ask(TEXT, {"prompt": "a", "cache_salt": SECRET * 99}).json()["error"]
        assert error["param"] == "cache_salt" and SECRET not in error["message"]


def test_a_prompt_is_echoed_and_scored(client: Client) -> None:
    """As lm-eval's `local-completions` scores the choices of a question: the right answer is likelier than others."""
    ask = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
    asked = client.ask("/tokenize", {"model": "tiny", "messages": ASK["messages"]}).json()["tokens"]
    (right,) = client.pipe.generate([ASK["messages"]], max_new_tokens=24)
    wrong = [[token + 1 if i % 5 == at else token for i, token in enumerate(right.ids)] for at in range(3)]
    prompts = [asked + ids for ids in (right.ids, *wrong)]
    both = client.ask(TEXT, ask | {"prompt": prompts}).json()
    assert "likelihood bound" in both["dinfer"]["echo"] and all(
        right.text[:9] in c["text"] for c in both["choices"][:1]
    )
    sums = []
    for choice in both["choices"]:
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        sums.append(sum(scores["token_logprobs"][len(asked) :]))
        assert all(max(best.values()) >= best[token] for token, best in zip(
            scores["tokens"][1:], scores["top_logprobs"][1:], strict=True
        ))  # fmt: skip
    assert sums[0] == max(sums) > -10, sums
    ids = prompts[0]
    more = client.ask(TEXT, ask | {"prompt": ids, "max_tokens": 4}).json()["choices"][0]
    assert more["text"].startswith(both["choices"][0]["text"]) and more["logprobs"]["token_logprobs"][
        1:8
    ] == pytest.approx(both["choices"][0]["logprobs"]["token_logprobs"][1:8], abs=1e-4)
    streamed = pieces(client.ask(TEXT, ask | {"prompt": ids, "max_tokens": 4, "stream": True}))
    assert "".join(piece["choices"][0]["text"] for piece in streamed) == more["text"]
    assert client.ask(TEXT, ask | {"echo": False, "prompt": "a"}).json()["error"]["param"] == "max_tokens"
    for wrong in ([], [10**9], [-1], [client.pipe.model.spec.mask_id]):
        refused = client.ask(TEXT, ask | {"prompt": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["message"], wrong


def test_each_token_of_a_prompt_is_scored_as_vllm_writes_it(client: Client) -> None:
    """The values are those of `echo`; the token of the prompt stands beside the best."""
    ids = client.ask("/tokenize", {"model": "tiny", "prompt": QUESTION}).json()["tokens"][:9]
    ask = {"model": "tiny", "prompt": [ids, ids[:4]], "max_tokens": 4}
    whole = client.ask(TEXT, ask | {"prompt_logprobs": 2}).json()
    echoed = client.ask(TEXT, ask | {"echo": True, "logprobs": 2}).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert "likelihood bound" in whole["dinfer"]["prompt_logprobs"]
    for choice, prompt in zip(whole["choices"], ask["prompt"], strict=True):
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(prompt) - 1
        for token, told in zip(prompt[1:], others, strict=True):
            ranks = sorted(one["rank"] for one in told.values())
            assert ranks[:2] == [1, 2] and len(ranks) <= 3
            assert told[str(token)]["decoded_token"] == client.pipe.decode([token])
    told = whole["choices"][0]["prompt_logprobs"]
    own = [one[str(token)]["logprob"] for one, token in zip(told[1:], ids[1:], strict=True)]
    assert own == pytest.approx(echoed[1 : len(ids)], abs=1e-4)
    talked = chat(client, prompt_logprobs=0).json()
    assert len(talked["prompt_logprobs"]) == talked["usage"]["prompt_tokens"]
    assert all(len(one) == 1 for one in talked["prompt_logprobs"][1:]) and "dinfer" in talked
    assert chat(client).json()["prompt_logprobs"] is None
    assert chat(client, prompt_logprobs=1, stream=True).json()["error"]["param"] == "prompt_logprobs"
    traced = client.ask("/v1/trace", ASK | {"prompt_logprobs": 0})
    assert traced.json()["error"]["param"] == "prompt_logprobs"


def test_every_piece_of_a_stream_of_completions_has_log_probabilities(client: Client) -> None:
    """The last one as well: its text has the reason of the end beside it, so no piece comes without tokens."""
    ask = {"model": "tiny", "prompt": QUESTION, "max_tokens": 16, "logprobs": 2, "stream": True, "ignore_eos": True}
    told = [piece["choices"][0] for piece in pieces(client.ask(TEXT, ask))]
    assert all(one["logprobs"]["tokens"] for one in told)
    assert [one["finish_reason"] for one in told] == [None] * (len(told) - 1) + ["length"]


def test_usage_stands_in_every_piece_or_in_none(client: Client) -> None:
    def told(**options: bool) -> list[Any]:
        return [piece.get("usage", "absent") for piece in pieces(chat(client, stream=True, stream_options=options))]

    assert set(told(continuous_usage_stats=True)) == {"absent"}
    *before, last = told(include_usage=True)
    assert set(before) == {None} and last["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(told(include_usage=True, continuous_usage_stats=True))


def test_usage_counts_the_tokens_whose_keys_were_there() -> None:
    """The next turn of a conversation begins with whole blocks of the last one, if runtime.share keeps them."""
    pipe = dinfer.load("tiny-llada2", device="cpu", runtime=dinfer.Runtime(rows=4, share=True))
    turns = [{"role": "user", "content": f"{QUESTION} {QUESTION}"}]
    with served(pipe=pipe) as found:
        first = chat(found, messages=turns).json()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "And how many books?"}]
        second = chat(found, messages=turns).json()
    cached, again = (one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second))
    assert cached == 0 < again <= first["usage"]["total_tokens"] and again % pipe.model.spec.attention_block == 0


def test_all_choices_of_a_prompt_find_the_keys_that_one_computed() -> None:
    """The server has room for `rows` canvases from the beginning; where room grows, keys are computed anew."""
    pipe = dinfer.load("tiny-llada2", device="cpu", runtime=dinfer.Runtime(rows=4, share=True, max_length=256))
    turns = [{"role": "user", "content": f"{QUESTION} {QUESTION}"}]
    with served(pipe=pipe) as found:
        told = [chat(found, messages=turns, n=n).json()["usage"]["prompt_tokens_details"] for n in (1, 2, 3)]
    assert [one["cached_tokens"] > 0 for one in told] == [False, True, True]


def test_a_prompt_may_be_cut(client: Client) -> None:
    ask = {"model": "tiny", "prompt": "2 + 3 " * 200, "max_tokens": 16, "return_token_ids": True}
    ids = client.ask("/tokenize", {"model": "tiny", "prompt": ask["prompt"]}).json()["tokens"]
    for most, want in ((5, 5), (-1, 256 - 16)):
        (choice,) = client.ask(TEXT, ask | {"truncate_prompt_tokens": most}).json()["choices"]
        assert choice["prompt_token_ids"] == ids[-want:]
    (choice,) = client.ask(TEXT, ask | {"truncate_prompt_tokens": 5, "truncation_side": "right"}).json()["choices"]
    assert choice["prompt_token_ids"] == ids[:5]
    error = client.ask(TEXT, ask).json()["error"]
    assert "This model's maximum context length is 256 tokens" in error["message"] and error["param"] == "prompt"


def test_what_a_client_asks_of_the_server_itself(client: Client) -> None:
    assert client.ask("/version").json() == {"version": dinfer.__version__}
    card = client.ask("/v1/models/tiny").json()
    assert (card["max_model_len"], card["root"], card["parent"]) == (256, "tiny", None)
    told = client.ask("/tokenize", {"model": "tiny", "prompt": QUESTION, "return_token_strs": True}).json()
    assert told["max_model_len"] == 256 and told["count"] == len(told["tokens"])
    assert told["token_strs"] == client.pipe.tokenizer.convert_ids_to_tokens(told["tokens"])
    assert {"400", "404"} <= client.ask("/openapi.json").json()["paths"][CHAT]["post"]["responses"].keys()


def test_no_message_holds_a_prompt_with_half_of_a_surrogate_pair(client: Client) -> None:
    bad, fine = f"{SECRET} \ud800", [{"role": "user", "content": "a"}]
    for path, body, field in (
        (CHAT, {"messages": [{"role": "user", "content": bad}]}, "messages.0.content"),
        (TEXT, {"prompt": bad}, "prompt"), ("/v1/responses", {"input": bad}, "input"),
        (CHAT, {"messages": [fine[0] | {"reasoning_content": bad}]}, "messages.0.reasoning_content"),
        (CHAT, {"messages": fine, "chat_template_kwargs": {"a": bad}}, "messages"),
        ("/v1/messages", {"messages": fine, "max_tokens": 1, "system": bad}, None),
        ("/v1/systemone", {"state": "a", "questions": {"q": {"type": "noul", "instructions": bad}}}, None),
        ("/v1/infill", {"text": f"{bad}[MASK:1]"}, "text"), ("/tokenize", {"prompt": bad}, "prompt"),
    ):  # fmt: skip
        sent = client.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        answer = client.loop.run(sent)
        assert answer.status_code in (400, 422) and SECRET not in answer.text, answer.text
        assert "half of a surrogate pair" in answer.text and field in (None, answer.json()["error"].get("param"))


def test_no_message_holds_a_prompt_or_more_than_80_characters_of_a_name(client: Client) -> None:
    long, asked = "x" * 1_000_000, [{"role": "user", "content": SECRET}]
    for path, body in (
        (CHAT, {"messages": asked, "stream_options": {}}), (CHAT, {"messages": asked, "top_logprobs": 1}),
        (CHAT, {"messages": SECRET}), (CHAT, {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        (CHAT, {"messages": asked, "promt": SECRET}), (TEXT, {"prompt": {"text": SECRET}}),
        (TEXT, {"prompt": [SECRET, 5]}), (TEXT, {"prompt": [SECRET], "suffix": SECRET}), (TEXT, [SECRET]),
        (CHAT, {"messages": asked, "prediction": {"content": SECRET}}),
        (CHAT, {"messages": asked, long: 1}), (CHAT, {"messages": asked, "dinfer": {long: 1}}),
        (CHAT, {"messages": asked, "dinfer": {"threshold": long}}), (CHAT, {"messages": asked, "tool_choice": long}),
        (CHAT, {"messages": [{"role": long, "content": "a"}]}), (f"/v1/models/{long[:9000]}", None),
    ):  # fmt: skip
        response = client.ask(path, {"model": "tiny"} | body if isinstance(body, dict) else body)
        assert 400 <= response.status_code < 500 and len(response.text) < 1200, response.text[:2000]
        assert SECRET not in response.text and "x" * 81 not in response.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"model": "\xff"}', "is not UTF-8"), (b"[" * 5000 + b"]" * 5000, "too many brackets"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"), (b'{"seed": ', "is not JSON"),
    ],
    ids=["bytes", "depth", "number", "end"],
)  # fmt: skip
def test_a_body_that_cannot_be_read_says_why(client: Client, body: bytes, why: str) -> None:
    asked = client.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    response = client.loop.run(asked)
    assert response.status_code == 400 and why in response.json()["error"]["message"]


def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dinfer.Pipeline, "encode", lambda *_, **__: pytest.fail("it is encoded"))
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "2 + 3 " * 100_000}]}), (TEXT, {"prompt": "2 + 3 " * 100_000}),
        ("/tokenize", {"prompt": "2 + 3 " * 100_000}), ("/v1/infill", {"text": "[MASK:1]" + "2 + 3 " * 100_000}),
    ):  # fmt: skip
        error = client.ask(path, {"model": "tiny"} | body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "600" in error["message"]


def test_a_filled_text_may_be_sent_again(client: Client) -> None:
    text = r"\[MASK:3] is no gap, \\\[MASK:1] is none, and Tom has [MASK:1] coins."
    filled = client.ask("/v1/infill", {"model": "tiny", "text": text}).json()["text"]
    again = client.ask("/v1/infill", {"model": "tiny", "text": filled + "[MASK:1]"}).json()
    assert len(again["gaps"]) == 1 and again["text"].startswith(filled[:20])
