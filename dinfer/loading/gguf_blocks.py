"""Which weights of a GGUF file a CPU keeps as blocks."""

import math
from collections.abc import Collection, Mapping

from dinfer.kernels.cpu.linear import library
from dinfer.layers.formats.blocks import Blocks, Section
from dinfer.loading.gguf_file import BLOCKS, dequantised
from dinfer.loading.safetensors_io import Stored
from dinfer.parallel.split import Placement


def blocks_of(
    tensors: Mapping[str, Stored], placements: Mapping[str, Placement], changed: Collection[str]
) -> dict[str, Blocks]:
    """The parameters that can keep their blocks on a CPU, whose kernels multiply with them.

    These are matrices all of whose weights are blocks of some type. `changed`: weights that an adapter changes.
    """
    sections: dict[str, list[tuple[int, Section]]] = {}
    others = set() if library() is not None else {place.parameter for place in placements.values()}
    for name, place in placements.items():
        found = tensors[name]
        if found.dtype in BLOCKS and len(found.shape) > 1 and name not in changed and place.expert is None:
            size = found.size // math.prod(found.shape[:-1])
            section = Section(found.dtype, found.shape[-2], size)
            sections.setdefault(place.parameter, []).append((place.row, section))
        else:
            others.add(place.parameter)
    return {
        parameter: Blocks([section for _, section in sorted(found)], dequantised)
        for parameter, found in sections.items()
        if parameter not in others
    }
