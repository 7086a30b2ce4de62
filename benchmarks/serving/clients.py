"""Checks a server with unmodified clients: openai, curl, langchain-openai, and lm-eval against `dinfer eval`.

pip install openai langchain-openai 'lm-eval[api]'      # beside dinfer
python -m benchmarks.serving.clients --problems 200 --out benchmarks/results/serving-clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import torch
from langchain_openai import ChatOpenAI

import dinfer
from benchmarks.provenance import provenance, show
from benchmarks.serving.process import serving
from dinfer.demo.problems import generate

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 128
QUESTIONS = [problem.question for problem in generate("heldout", 16, 0)]
ASKED = [[{"role": "user", "content": question}] for question in QUESTIONS]
SERVER = ("device=cpu", "runtime.rows=16", f"max_new_tokens={NEW_TOKENS}")


def of_openai(url: str, want: list[str]) -> dict[str, bool]:
    """The synchronous client."""
    with openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as client:
        ask = client.chat.completions.create
        whole = [ask(model="tiny", messages=messages) for messages in ASKED]
        pieces = list(ask(model="tiny", messages=ASKED[0], stream=True, stream_options={"include_usage": True}))
        drawn = [
            [
                choice.message.content
                for choice in ask(model="tiny", messages=ASKED[0], n=3, temperature=1, seed=5).choices
            ]
            for _ in range(2)
        ]
        stop = want[0].split()[2]
        scored = ask(model="tiny", messages=ASKED[0], logprobs=True, top_logprobs=2).choices[0].logprobs.content
        old = client.completions.create(model="tiny", prompt=[QUESTIONS[0]] * 2, max_tokens=16)
        own = ask(model="tiny", messages=ASKED[0], extra_body={"dinfer": {"threshold": 1.0}})
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=ASKED[0])
        return {
            "models are listed": [model.id for model in client.models.list()] == ["tiny"],
            "answers are the library's": [answer.choices[0].message.content for answer in whole] == want,
            "pieces are the answer": "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == want[0],
            "usage of a stream is that of the answer": pieces[-1].usage == whole[0].usage,
            "usage has forwards": own.usage.dinfer["forwards"] > whole[0].usage.dinfer["forwards"] > 0,
            "n answers differ and repeat by seed": drawn[0] == drawn[1] and len(set(drawn[0])) > 1,
            "a stop string ends the answer": ask(
                model="tiny", messages=ASKED[0], stop=stop
            ).choices[0].message.content == want[0][: want[0].find(stop)],
            "log-probabilities are of the answer's tokens": "".join(one.token for one in scored) == want[0],
            "completions take several prompts": len({choice.text for choice in old.choices}) == 1,
            "a request has an id": raw.headers["x-request-id"].startswith("req-"),
            "400 is BadRequestError": raises(
                openai.BadRequestError, "tools", lambda: ask(model="tiny", messages=ASKED[0], tools=[{"a": 1}])
            ),
            "404 is NotFoundError": raises(
                openai.NotFoundError, "model", lambda: ask(model="gpt", messages=ASKED[0])
            ),
        }  # fmt: skip


def raises(kind: type[openai.APIStatusError], param: str, call: Callable[[], Any]) -> bool:
    """Whether `call` raises this error about this field."""
    try:
        call()
    except kind as error:
        return error.param == param
    return False


async def of_async_openai(url: str, want: list[str]) -> dict[str, bool]:
    """The asynchronous client, with all questions at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as client:

        async def whole(messages: Any) -> str | None:
            return (await client.chat.completions.create(model="tiny", messages=messages)).choices[0].message.content

        async def streamed(messages: Any) -> str:
            stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in stream])

        return {
            "answers at once are the library's": await asyncio.gather(*map(whole, ASKED)) == want,
            "streams at once are the library's": await asyncio.gather(*map(streamed, ASKED)) == want,
        }


def of_curl(url: str, want: list[str]) -> dict[str, bool]:
    """curl, with the command of docs/serving.md."""

    def ask(**fields: Any) -> str:
        body = json.dumps({"model": "tiny", "messages": ASKED[0], **fields})
        command = ["curl", "-sN", f"{url}v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    events = [line.removeprefix("data: ") for line in ask(stream=True).split("\n\n") if line]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    return {
        "the answer is the library's": json.loads(ask())["choices"][0]["message"]["content"] == want[0],
        "a stream ends with [DONE]": events[-1] == "[DONE]" and "".join(pieces) == want[0],
    }


def of_langchain(url: str, want: list[str]) -> dict[str, bool]:
    """LangChain's chat model, and its stream."""
    model = ChatOpenAI(model="tiny", base_url=f"{url}v1", api_key="none", max_retries=0)
    few = ChatOpenAI(
        model="tiny", base_url=f"{url}v1", api_key="none", extra_body={"dinfer": {"threshold": 1.0}}
    ).invoke(QUESTIONS[0])
    answer = model.invoke(QUESTIONS[0])
    return {
        "the answer is the library's": answer.content == want[0],
        "pieces are the answer": "".join(str(piece.content) for piece in model.stream(QUESTIONS[0])) == want[0],
        "answers at once are the library's": [answer.content for answer in model.batch(QUESTIONS)] == want,
        "usage is read": answer.usage_metadata["output_tokens"] > 0,
        "options of ours go through": bool(few.content),
    }


def of_lm_eval(url: str, folder: Path, problems: int) -> dict[str, Any]:
    """lm-eval's `local-chat-completions` against the server, and `dinfer eval`: compares answers problem by problem."""
    served, own = folder / "served", folder / "own"
    arguments = f"model=tiny,base_url={url}v1/chat/completions,num_concurrent=16,max_retries=1"
    quiet: dict[str, Any] = {"check": True, "cwd": ROOT, "stdout": subprocess.DEVNULL}
    subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", arguments,
            "--tasks", "mini_gsm", "--include_path", "evaluations/tasks", "--apply_chat_template", "--limit",
            str(problems), "--gen_kwargs", f"max_gen_toks={NEW_TOKENS}", "--log_samples", "--output_path", str(served),
        ],
        **quiet,
    )  # fmt: skip
    subprocess.run(
        [
            sys.executable, "-m", "dinfer", "eval", "tasks=mini_gsm", f"limit={problems}", "device=cpu",
            f"max_new_tokens={NEW_TOKENS}", f"out={own}",
        ],
        **quiet,
    )  # fmt: skip
    answers = []
    for where in (served, own):
        (path,) = where.rglob("*samples*.jsonl")
        answers.append([json.loads(line) for line in path.read_text().splitlines()])
    texts = [{line["doc_id"]: text_of(line) for line in lines} for lines in answers]
    same = sum(texts[0].get(document) == text for document, text in texts[1].items())
    return {"problems": len(texts[1]), "same": same, "answers are dinfer eval's": same == len(texts[1]) == problems}


def text_of(line: dict[str, Any]) -> Any:
    """The answer in a line of samples, from lm-eval or from us."""
    found = line["resps"] if "resps" in line else line["response"]
    while isinstance(found, list):
        (found,) = found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200, help="of mini_gsm, for lm-eval")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    pipe = dinfer.load("tiny", device="cpu")
    want = [result.text for result in pipe.generate(ASKED, max_new_tokens=NEW_TOKENS)]
    with tempfile.TemporaryDirectory() as name, serving(*SERVER, log=f"{name}/server.log") as server:
        found = {
            f"openai {version('openai')}": of_openai(server.url, want),
            f"openai {version('openai')}, asynchronous": asyncio.run(of_async_openai(server.url, want)),
            "curl": of_curl(server.url, want),
            f"langchain-openai {version('langchain-openai')}": of_langchain(server.url, want),
            f"lm-eval {version('lm_eval')}, local-chat-completions": of_lm_eval(
                server.url, Path(name), args.problems
            ),
        }  # fmt: skip
    document = {**provenance(torch.device("cpu")), "server": list(SERVER), "clients": found}
    show(document, args.out)
    failed = [f"{client}: {what}" for client, checks in found.items() for what, ok in checks.items() if ok is False]
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
