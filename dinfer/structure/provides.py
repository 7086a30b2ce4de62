"""What core gets from this layer, see `dinfer.core.provided`."""

from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.form import compiler_of, form_of
from dinfer.structure.infilling import infill, infill_ids
from dinfer.structure.language import Language
from dinfer.structure.questions import layout, read

__all__ = ["answer_in", "compiler_of", "form_of", "infill", "infill_ids", "layout", "read"]


def answer_in(language: Language, prompt: int, new_tokens: int) -> InLanguage:
    """How an answer of so many tokens behind a prompt is in a language."""
    return InLanguage(language, prompt, prompt + new_tokens)
