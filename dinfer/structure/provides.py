"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any

ADDRESSES = {
    "compiler_of": "dinfer.structure.form:compiler_of",
    "form_of": "dinfer.structure.form:form_of",
    "hold": "dinfer.structure.paths:hold",
    "in_languages": "dinfer.structure.paths:in_languages",
    "infill": "dinfer.structure.infilling:infill",
    "infill_ids": "dinfer.structure.infilling:infill_ids",
    "layout": "dinfer.structure.questions:layout",
    "paths_in_languages": "dinfer.structure.paths:paths_in_languages",
    "read": "dinfer.structure.questions:read",
}


def answer_in(language: Any, prompt: int, new_tokens: int) -> Any:
    """How an answer of so many tokens behind a prompt is in a `Language`: an `InLanguage`."""
    from dinfer.structure.abilities.constraints import InLanguage

    return InLanguage(language, prompt, prompt + new_tokens)
