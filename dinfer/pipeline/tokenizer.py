"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dinfer.loading.files import Folder, read_object
from dinfer.loading.plan import small_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(folder: Path, name: str | None) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; `name`: the class of transformers that reads it where its own is remote code."""
    if folder.is_file():
        return _from_metadata(small_files(folder))
    if (folder / "tokenizer.json").is_file():
        # Complete in itself. AutoTokenizer would look into config.json too, and warn of model types it does not know.
        from transformers import PreTrainedTokenizerFast  # slow to import, and not needed for token ids

        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # the tokenizers package raises bare ones
            read_object(folder / "tokenizer.json")  # says it if this is not even JSON
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    if not (folder / "tokenizer_config.json").is_file():
        return None
    import transformers

    if name is not None and (folder / "vocab.json").is_file():
        return getattr(transformers, name).from_pretrained(folder)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}\nCode that comes with a checkpoint is never run. If "
            "its tokenizer is such code, put a tokenizer.json into the folder."
        ) from error


def _from_metadata(files: Folder) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a GGUF file."""
    if not (files / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast  # slow to import, and not needed for token ids

    settings = read_object(files / "tokenizer_config.json")
    whole = Tokenizer.from_str((files / "tokenizer.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_object=whole, **settings)
