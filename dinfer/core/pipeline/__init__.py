"""Text, messages or token ids in, results out: what most users of the library call."""

from dinfer.core.pipeline.pipeline import Pipeline, Result, load
from dinfer.core.pipeline.tokenizer import TextStream

__all__ = ["Pipeline", "Result", "TextStream", "load"]
