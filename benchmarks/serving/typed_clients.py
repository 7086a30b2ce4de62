"""Asks a server for objects with unmodified clients, each in a Python of its own, and counts those of the right type.

python -m venv CLIENTS/openai && CLIENTS/openai/bin/pip install openai     # one for each name in `CLIENTS` below
python -m benchmarks.serving.typed_clients CLIENTS --out benchmarks/results/serving-typed-clients.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

KEY, MODEL = "none", "tiny"
AT_ONCE = 10  # questions
ALONE = ("pydantic-ai",)  # its blocking calls share an event loop
Ask = Callable[[str], Any]


class Item(BaseModel):
    kind: Literal["coins", "books", "stamps"]
    count: int


class Order(BaseModel):
    """What somebody buys."""

    buyer: str
    items: list[Item]
    paid: bool


class Outputs(BaseModel):
    """What a program of dspy answers."""

    order: Order


class Step(BaseModel):
    """What smolagents' agent that writes code wants of a model."""

    thought: str
    code: str


class Anything(BaseModel):
    """For JSON modes, which tell a server of no schema: any object."""

    model_config = ConfigDict(extra="allow")


def said(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def of_openai(url: str) -> dict[str, Ask]:
    import openai

    chats: Any = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0).chat.completions
    calls: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Order)], "tool_choice": "required"}

    def streamed(question: str, **how: Any) -> Any:
        with chats.stream(model=MODEL, messages=said(question), **how) as stream:
            return stream.get_final_completion().choices[0].message

    def parsed(question: str, **how: Any) -> Any:
        return chats.parse(model=MODEL, messages=said(question), **how).choices[0].message

    return {
        "parse, response_format": lambda q: parsed(q, response_format=Order).parsed,
        "stream, response_format": lambda q: streamed(q, response_format=Order).parsed,
        "parse, tools": lambda q: parsed(q, **calls).tool_calls[0].function.parsed_arguments,
        "stream, tools": lambda q: streamed(q, **calls).tool_calls[0].function.parsed_arguments,
    }


def of_instructor(url: str) -> dict[str, Ask]:
    import instructor
    import openai

    def ask(mode: str, kind: Any) -> Ask:
        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
        )
        return lambda q: client.create(model=MODEL, messages=said(q), response_model=kind, max_retries=0)

    return {mode: ask(mode, kind) for mode, kind in (("TOOLS", Order), ("JSON_SCHEMA", Order), ("JSON", Anything))}


def of_pydantic_ai(url: str) -> dict[str, Ask]:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))
    kinds: dict[str, Any] = {
        "output_type": Order, "NativeOutput": NativeOutput(Order), "PromptedOutput": PromptedOutput(Anything),
    }  # fmt: skip

    def ask(kind: Any) -> Ask:
        agent: Any = Agent(model, output_type=kind)
        return lambda q: agent.run_sync(q).output

    return {name: ask(kind) for name, kind in kinds.items()}


def of_langchain(url: str) -> dict[str, Ask]:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL, max_retries=0)
    kinds: dict[str, Any] = {"json_schema": Order, "function_calling": Order, "json_mode": Anything}
    asks: dict[str, Ask] = {
        f"with_structured_output, {method}": chat.with_structured_output(kind, method=method).invoke
        for method, kind in kinds.items()
    }
    bound = chat.bind_tools([Order], tool_choice="any")

    def streamed(question: str) -> Any:
        first, *more = bound.stream(question)
        for piece in more:
            first += piece
        return Order.model_validate(first.tool_calls[0]["args"])

    return asks | {
        "bind_tools": lambda q: Order.model_validate(bound.invoke(q).tool_calls[0]["args"]),
        "bind_tools, stream": streamed,
    }


def of_smolagents(url: str) -> dict[str, Ask]:
    """Only the first step of an agent: the model in the box has no room for a second one."""
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=url, api_key=KEY)

    def called(question: str) -> Any:
        bought: list[tuple[Any, ...]] = []

        @tool
        def buy(buyer: str, count: int, paid: bool) -> str:
            """Buys something.

            Args:
                buyer: who
                count: how many
                paid: whether it is paid
            """
            bought.append((buyer, count, paid))
            return "bought"

        agent = ToolCallingAgent([buy], model, max_steps=1, verbosity_level=0)
        agent.run(question)
        (call,) = agent.memory.steps[1].tool_calls
        if call.name == "final_answer":
            return Order(buyer=call.arguments["answer"], items=[], paid=False)
        buyer, count, paid = bought[0]
        return Order.model_validate({"buyer": buyer, "items": [{"kind": "books", "count": count}], "paid": paid})

    def coded(question: str) -> Any:
        agent = CodeAgent([], model, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True)
        agent.run(question)
        return Step.model_validate_json(agent.memory.steps[1].model_output)

    return {"ToolCallingAgent": called, "CodeAgent, structured": coded}


def of_litellm(url: str) -> dict[str, Ask]:
    import litellm

    tool = {"type": "function", "function": {"name": "order", "parameters": Order.model_json_schema()}}

    def message(model: str, question: str, **how: Any) -> Any:
        made: Any = litellm.completion(model, messages=said(question), api_base=url, api_key=KEY, **how)
        return made.choices[0].message

    def form(model: str) -> Ask:
        return lambda q: Order.model_validate_json(message(model, q, response_format=Order).content)

    def call(model: str) -> Ask:
        how = {"tools": [tool], "tool_choice": "required"}
        return lambda q: Order.model_validate_json(message(model, q, **how).tool_calls[0].function.arguments)

    kinds = {"response_format": form, "tools": call}
    return {
        f"{provider}, {name}": kind(f"{provider}/{MODEL}")
        for provider in ("openai", "hosted_vllm")
        for name, kind in kinds.items()
    }


def of_dspy(url: str) -> dict[str, Ask]:
    """By itself it sends no form to a model it does not know: `response_format` of its LM says one."""
    import dspy

    signature = dspy.Signature("question: str -> order: Order", custom_types={"Order": Order})
    model = dspy.LM(f"openai/{MODEL}", api_base=url, api_key=KEY, cache=False, response_format=Outputs)

    def ask(question: str) -> Any:
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            return dspy.Predict(signature)(question=question).order

    return {"JSONAdapter, response_format": ask}


CLIENTS: dict[str, tuple[str, Callable[[str], dict[str, Ask]]]] = {  # the package, and what it is asked
    "openai": ("openai", of_openai),
    "instructor": ("instructor", of_instructor),
    "pydantic-ai": ("pydantic-ai-slim", of_pydantic_ai),
    "langchain": ("langchain-openai", of_langchain),
    "smolagents": ("smolagents", of_smolagents),
    "litellm": ("litellm", of_litellm),
    "dspy": ("dspy", of_dspy),
}


def wrong(ask: Ask, question: str) -> str | None:
    """Why an answer is no object of its type; None: it is one."""
    try:
        answer = ask(question)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None if isinstance(answer, (Order, Anything, Step)) else f"{answer!r:.300} is of another type"


def asked(name: str, url: str, questions: list[str]) -> dict[str, Any]:
    """How many objects of the type a client gets by each of its methods, and the first errors."""
    package, of = CLIENTS[name]
    found: dict[str, Any] = {}
    for method, ask in of(url).items():
        began = time.perf_counter()
        with ThreadPoolExecutor(1 if name in ALONE else AT_ONCE) as pool:
            errors = [error for error in pool.map(partial(wrong, ask), questions) if error]
        found[method] = {"asked": len(questions), "typed": len(questions) - len(errors), "errors": errors[:3]}
        found[method]["seconds"] = round(time.perf_counter() - began, 1)
    return {"version": version(package), "methods": found}


def main() -> None:
    """Starts a server and a process for each client. Those processes need the client and pydantic alone."""
    import torch

    from benchmarks.provenance import provenance, save
    from benchmarks.serving.process import serving
    from dinfer.demo.problems import generate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has NAME/bin/python for each client")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=[*CLIENTS])
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    questions = [problem.question for problem in generate("heldout", arguments.questions, 0)]
    settings = (f"model={MODEL}", "device=cpu", "runtime.rows=10", "max_new_tokens=128")
    found: dict[str, Any] = {}
    record = provenance(torch.device("cpu")) | {"server": settings, "clients": found}
    with tempfile.NamedTemporaryFile() as log, serving(*settings, log=log.name) as server:
        for name in arguments.clients:
            command = [str(arguments.folder / name / "bin/python"), __file__, name, f"{server.url}v1"]
            done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, json.dumps(found[name]), flush=True)
            save(record, arguments.out)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in CLIENTS:
        print(json.dumps(asked(*sys.argv[1:], json.load(sys.stdin))))
    else:
        main()
