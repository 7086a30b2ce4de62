"""Languages on the device, without a running batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dinfer.structure.abilities.constraints import InLanguage, LanguageRows
from dinfer.structure.kernels.languages import Sweeps
from dinfer.structure.language import Language


def sweeps_of(languages: Sequence[Language], device: str = "cpu") -> Sweeps:
    """One lane for each language."""
    row_N6 = torch.zeros(len(languages) + 1, 6, dtype=torch.int64, device=device)
    rows = LanguageRows(row_N6, max(len(found.class_V) for found in languages), row_N6)
    place_B = torch.tensor([rows.admit(slot, InLanguage(found, 0, 1))[0] for slot, found in enumerate(languages)]).to(
        device
    )
    assert rows.languages is not None
    most = [
        max(counts) for counts in zip(*((f.states, len(f.pairs_P2), len(f.edges_E3)) for f in languages), strict=True)
    ]
    return Sweeps(rows.languages, place_B, *most)
