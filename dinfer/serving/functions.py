"""Functions that an answer may call: OpenAI's fields of a chat, and messages that hold calls and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from dinfer.pipeline.inputs import encodable
from dinfer.serving.errors import ApiError, invalid, refused
from dinfer.serving.forms import Held, HeldFields, Strict, wrong
from dinfer.structure import ConstraintError, functions_of
from dinfer.structure import tools as calling


class FunctionName(Strict):
    name: str


class NamedFunction(Strict):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


def _object(text: str) -> str:
    try:
        value = json.loads(encodable(text) or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be the text of a JSON object")
    return text


class CalledFunction(Strict):
    name: Annotated[str, AfterValidator(encodable)]
    arguments: Annotated[str, AfterValidator(_object)]


class ToolCall(Strict):
    """A call in a message of the assistant."""

    type: Literal["function"] = "function"
    function: CalledFunction
    id: Annotated[str, AfterValidator(encodable)] | None = None
    index: int | None = None  # of streams, whose pieces some clients send back

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: `arguments` is the object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"type": self.type, "id": self.id, "function": function}


class ToolFields(HeldFields):
    """Fields of a chat whose answer may call functions."""

    tools: list[dict[str, Any]] | None = None  # the chat template gets them as they are
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None

    @property
    def named(self) -> str | None:
        """The function that the answer must call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedFunction) else None

    @property
    def choice(self) -> str:
        """auto, required, or the name of a function."""
        return self.tool_choice if isinstance(self.tool_choice, str) else self.named or "auto"

    @property
    def functions(self) -> Mapping[str, dict[str, Any] | None]:
        """The parameters of each function. Raises ApiError."""
        try:
            return functions_of(self.tools or [])
        except ConstraintError as error:
            raise wrong("tools", error) from error

    @property
    def called(self) -> list[str]:
        """The functions that the answer may call."""
        return [*self.functions] if self.named is None else [self.named]

    @property
    def form(self) -> Held | None:
        """What an answer without calls is held to. Raises ApiError."""
        return super().held

    @property
    def held(self) -> Held | None:
        """Calls, or what an answer without calls is held to. Raises ApiError."""
        form, choice, functions = self.form, self.choice, self.functions
        if self.named is not None and self.named not in functions:
            known = ", ".join(functions) or "no tools"
            raise invalid("tool_choice.function.name", f"={self.named!r:.80} is none of the functions: {known:.80}")
        if not functions:
            if self.tool_choice is not None:
                raise refused("tool_choice", choice, "needs tools: say which functions there are")
            return form
        if form is not None and (choice != "auto" or form.constraint.kind != "json_schema"):
            what = f"tool_choice={choice!r:.80}" if choice != "auto" else "tools"
            raise ApiError(400, f"{form.field} and {what} are both given: leave one out", form.field, "invalid_value")
        content = None if form is None else json.loads(form.constraint.text)
        try:
            one = self.parallel_tool_calls is False
            return Held("tools", calling(functions, choice, parallel=not one, content=content))
        except ConstraintError as error:
            raise wrong("tools", error) from error
