"""Languages that an answer must be in: regular expressions, choices, JSON Schema, grammars, tools.

It needs numpy alone and knows nothing of models. `Compiler(vocabulary).compile(constraint)` gives a `Language`, whose
arrays the step reads; `tests.support.structure_reference` says in numpy what they mean for a canvas.
"""

from dinfer.structure.compiler import Compilation, Compiler
from dinfer.structure.constraint import Constraint, choice, grammar, json_object, json_schema, regex
from dinfer.structure.language import NEVER, Language, Vocabulary, vocabulary_of
from dinfer.structure.limits import Cancelled, ConstraintError, Limits
from dinfer.structure.tools import Call, calls_in, functions_of, tools

__all__ = [
    "NEVER", "Call", "Cancelled", "Compilation", "Compiler", "Constraint", "ConstraintError", "Language", "Limits",
    "Vocabulary", "calls_in", "choice", "functions_of", "grammar", "json_object", "json_schema", "regex", "tools",
    "vocabulary_of",
]  # fmt: skip
