"""What core gets from this layer, see `dinfer.core.provided`."""

from dinfer.structure.abilities.constraints import InLanguage
from dinfer.structure.form import compiler_of, form_of, in_gaps_of, languages_of
from dinfer.structure.language import Language
from dinfer.structure.questions import layout, read

__all__ = ["answer_in", "compiler_of", "form_of", "in_gaps_of", "languages_of", "layout", "read"]


def answer_in(language: Language, prompt: int, new_tokens: int) -> InLanguage:
    """How an answer of so many tokens behind a prompt is in a language."""
    return InLanguage(language, prompt, prompt + new_tokens)
