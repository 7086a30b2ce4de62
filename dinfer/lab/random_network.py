"""Networks with random weights, to measure speed and memory."""

from typing import Any

import torch

from dinfer.core.layers.linear import formatted
from dinfer.core.loading.checkpoint import divisions, empty_network
from dinfer.core.models.family import ModelFamily
from dinfer.core.provided import needed
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.terms.spec import ModelSpec


def random_network(
    family: ModelFamily, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, quantize: str | None = None,
    rank: Rank = WHOLE,
) -> Any:  # fmt: skip
    """A network with random weights of a trained model's scale, to measure speed and memory.

    A `rank` gets its share of the network that torch's seed makes. `quantize`: the format of all weights of linear
    layers and experts, each rounded as soon as it is made. Raises ValueError.
    """
    wanted = None if quantize is None else needed("format_of", f"quantize={quantize}", "formats")(quantize, device)
    network, divided = empty_network(family, spec, dtype, device, rank=rank, rest=wanted), divisions(family, spec, rank)
    shapes = dict(empty_network(family, spec, dtype, torch.device("meta")).named_parameters())
    rounded = {} if wanted is None else formatted(network)
    for name, parameter in network.named_parameters():
        split, whole = divided.get(name), parameter
        if split is not None or name in rounded:
            whole = torch.empty_like(shapes[name], device=device)
        if name.endswith(("norm.weight", "scale")):
            whole.fill_(1.0)
        elif whole.dim() == 1:  # a bias
            whole.normal_(0.0, 0.1)
        else:
            whole.normal_(0.0, whole.shape[-1] ** -0.5)
        if split is not None:
            shares = [whole.narrow(split.dim, first, end - first) for first, end in split.ranges(rank)]
            whole = torch.cat(shares, split.dim)
        if name in rounded:
            module, own = rounded[name]
            module.write(own, whole)
        elif split is not None:
            parameter.copy_(whole)
    if wanted is not None:
        from dinfer.formats.holding import settle

        settle(network)
    return network
