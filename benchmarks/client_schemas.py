"""The types of zod 4 and pydantic 2 through their real clients: does the schema compile, and are sampled answers valid?

    cd /tmp/zod && npm install zod@4
    python -m benchmarks.client_schemas --zod /tmp/zod --out benchmarks/results/client-schemas.json

Each schema is what the client writes, and each answer is judged by the client's own validation. `--model tiny` writes
answers with a model at temperature 1.5, in which the form has the say; without it texts of the language are drawn.
`--record FILE` keeps the schemas, so that tests need no client.
"""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import subprocess
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from benchmarks.provenance import provenance
from dinfer.structure import ConstraintError, json_schema
from dinfer.structure.compiler import compile_automaton
from tests.support.walks import walk

ZOD = pathlib.Path(__file__).with_suffix(".mjs")
STEPS = 90  # tokens of an answer


class Colour(enum.Enum):
    red, blue = "red", "blue"


class Level(enum.IntEnum):
    low, high = 1, 2


class Empty(BaseModel):
    pass


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int | None = None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: Literal["x"]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: bool


class Tree(BaseModel):
    value: bool
    children: list[Tree] = Field(default=[], max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Point(NamedTuple):
    x: int
    y: int


class Movie(TypedDict, total=False):
    title: str
    year: int


def pydantic_types() -> dict[str, Any]:
    """The types of the standard library that pydantic takes, and its own."""
    names = """
    StrictStr StrictInt StrictFloat StrictBool StrictBytes PositiveInt NegativeInt NonNegativeInt NonPositiveInt
    PositiveFloat NegativeFloat NonNegativeFloat NonPositiveFloat FiniteFloat UUID1 UUID3 UUID4 UUID5 UUID6 UUID7
    UUID8 FilePath DirectoryPath NewPath SocketPath SecretStr SecretBytes ByteSize PastDate FutureDate PastDatetime
    FutureDatetime AwareDatetime NaiveDatetime Base64Bytes Base64Str Base64UrlBytes Base64UrlStr JsonValue
    ImportString AnyUrl AnyHttpUrl FileUrl FtpUrl HttpUrl WebsocketUrl AnyWebsocketUrl EmailStr NameEmail
    IPvAnyAddress IPvAnyInterface IPvAnyNetwork PostgresDsn CockroachDsn AmqpDsn RedisDsn MongoDsn KafkaDsn NatsDsn
    MySQLDsn MariaDBDsn ClickHouseDsn SnowflakeDsn
    """
    own = {name: getattr(pydantic, name) for name in names.split() if hasattr(pydantic, name)}
    plain = [
        str, int, float, bool, bytes, decimal.Decimal, dt.date, dt.datetime, dt.time, dt.timedelta, uuid.UUID,
        pathlib.Path,
        re.Pattern, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface, ipaddress.IPv6Interface,
        ipaddress.IPv4Network, ipaddress.IPv6Network, Colour, Level, Empty, Person, Strict, Open, Tree, Point, Movie,
    ]  # fmt: skip
    made: dict[str, Any] = {
        "None": type(None), "Any": Any, "Literal": Literal["a", 1, None, True], "Optional[int]": Optional[int],  # noqa: UP045
        "Union[int, str]": int | str, "list[int]": list[int], "list": list,
        "tuple[int, str]": tuple[int, str],
        "tuple[int, ...]": tuple[int, ...], "set[int]": set[int], "set[str]": set[str],
        "set[Literal]": set[Literal["a", "b"]],
        "frozenset[Colour]": frozenset[Colour], "deque[int]": deque[int], "Sequence[int]": Sequence[int],
        "Iterable[int]": Iterable[int], "dict[str, int]": dict[str, int], "dict[Colour, int]": dict[Colour, int],
        "dict[int, str]": dict[int, str], "Mapping[str, bool]": Mapping[str, bool], "dict": dict,
        "conint(multiple_of=5)": Annotated[int, Field(multiple_of=5)],
        "multiple_of=0.5": Annotated[float, Field(multiple_of=0.5)],
        "multiple_of=0.01": Annotated[float, Field(multiple_of=0.01)],
        "gt, lt": Annotated[float, Field(gt=0.1, lt=0.3)],
        "condecimal": pydantic.condecimal(max_digits=5, decimal_places=2),
        "constr": Annotated[str, Field(min_length=2, max_length=4)],
        "pattern": Annotated[str, Field(pattern=r"^[a-c]+\d?$")],
        "conlist": Annotated[list[int], Field(min_length=1, max_length=3)],
        "conset": Annotated[set[int], Field(min_length=2, max_length=3)],
        "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
        "Json": pydantic.Json, "Json[int]": pydantic.Json[int], "Secret[int]": pydantic.Secret[int],
        "PaymentCardNumber": getattr(pydantic.types, "PaymentCardNumber", None),
        "list[Person]": Annotated[list[Person], Field(max_length=2)],
        "described": Annotated[int, Field(title="X", examples=[1])],
    }  # fmt: skip
    return {**{each.__name__: each for each in plain}, **made, **own}


def of_pydantic() -> tuple[dict[str, Any], dict[str, Callable[[str], bool]]]:
    """Schemas, or why there is none, and what judges a text, by the name of the type."""
    schemas: dict[str, Any] = {}
    judges: dict[str, Callable[[str], bool]] = {}
    for name, kind in pydantic_types().items():
        if kind is None:
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(kind)
            schemas[name] = adapter.json_schema()
            judges[name] = partial(_takes, adapter)
        except Exception as error:  # pydantic itself refuses
            schemas[name] = str(error).splitlines()[0]
    return schemas, judges


def _takes(adapter: TypeAdapter[Any], text: str) -> bool:
    try:
        adapter.validate_json(text)
    except pydantic.ValidationError:
        return False
    return True


def _node(mode: str, zod: str, sent: str = "") -> dict[str, Any]:
    found = subprocess.run(["node", str(ZOD), mode, zod], input=sent, capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout))


def writer(model: str | None, samples: int) -> Callable[[Any], list[str]]:
    """What writes answers in a schema."""
    if model is None:

        def walked(schema: Any) -> list[str]:
            automaton, rng = compile_automaton(json_schema(schema))[0], random.Random(0)
            return [walk(automaton, rng, rng.randrange(60)).decode() for _ in range(samples)]

        return walked
    import dinfer

    pipe = dinfer.load(model)

    def written(schema: Any) -> list[str]:
        return [
            pipe.generate("Write something.", schema=schema, seed=seed, temperature=1.5, max_new_tokens=STEPS).text
            for seed in range(samples)
        ]

    return written


def rows(client: str, schemas: dict[str, Any], answers: Callable[[Any], list[str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, schema in schemas.items():
        row: dict[str, Any] = {"client": client, "type": name}
        if isinstance(schema, str):
            row["no_schema"] = schema
        else:
            try:
                automaton, exact, _ = compile_automaton(json_schema(schema))
                row |= {"states": automaton.states, "exact": exact, "answers": answers(schema)}
            except (ConstraintError, ValueError) as error:
                row["refused"] = str(error)
        found.append(row)
        print(client, name, row.get("refused", row.get("no_schema", "compiles")), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zod", help="a folder in whose node_modules zod is")
    parser.add_argument("--model", help="writes the answers; none: texts of the language are drawn")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--record", type=pathlib.Path, help="where the schemas are kept")
    args = parser.parse_args()
    answers = writer(args.model, args.samples)
    schemas, judges = of_pydantic()
    found = rows("pydantic", schemas, answers)
    for row in found:
        if "answers" in row:
            row["valid"] = [judges[row["type"]](text) for text in row["answers"]]
    recorded = {"pydantic": schemas}
    versions = {"pydantic": pydantic.VERSION}
    if args.zod:
        recorded["zod"] = _node("schemas", args.zod)
        package = pathlib.Path(args.zod) / "node_modules" / "zod" / "package.json"
        versions["zod"] = json.loads(package.read_text())["version"]
        more = rows("zod", recorded["zod"], answers)
        sent = {row["type"]: row["answers"] for row in more if "answers" in row}
        verdicts = _node("validate", args.zod, json.dumps(sent))
        for row in more:
            if "answers" in row:
                row["valid"] = verdicts[row["type"]]
        found += more
    result = {**provenance(torch.device("cpu")), "clients": versions, "rows": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.record:
        args.record.write_text(json.dumps(recorded, indent=1) + "\n")
    for client in versions:
        own = [row for row in found if row["client"] == client and "no_schema" not in row]
        compiled = [row for row in own if "answers" in row]
        valid = sum(sum(row["valid"]) for row in compiled)
        judged = sum(len(row["valid"]) for row in compiled)
        print(f"{client}: {len(compiled)} of {len(own)} compile; {valid} of {judged} answers are valid")


if __name__ == "__main__":
    main()
