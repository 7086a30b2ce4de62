"""How new weights come from another process: by broadcasts of torch.distributed, or by memory of the same card.

Nothing here reads a pickle. A handle of CUDA's memory is what torch's own `rebuild_cuda_tensor` takes, as plain JSON.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

BUCKET = 1 << 28  # bytes that are received at a time, where tensors come one by one
PATIENCE = 300.0  # seconds
REACH = 30.0  # seconds in which a trainer that asks an engine to join must be there
HEX = ("handle", "ref_counter", "event")


def join(
    address: str, port: int, rank: int, size: int, backend: str = "gloo", name: str = "weight_update_group",
    patience: float = PATIENCE, reach: float = PATIENCE,
) -> Any:  # fmt: skip
    """A process group of a trainer, which is rank 0, and of engines, beside any that these processes have.

    All of them call this at the same time; SGLang's, slime's and AReaL's trainers make theirs so. Raises ValueError for
    a backend that is not there, and torch's error if rank 0 is not there in `reach` seconds or another process does not
    come in `patience`.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r:.40} is not known; use gloo or nccl")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} must be 0 to {size - 1}, as world_size={size}")
    wait = timedelta(seconds=patience)
    first = wait if rank == 0 else timedelta(seconds=min(patience, reach))
    tcp = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=first)
    tcp.set_timeout(wait)
    store = dist.PrefixStore(name, tcp)
    called: Any = name  # a type of its own in newer releases of torch
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], distributed_c10d.Backend(backend), store, group_name=called, timeout=wait
    )
    distributed_c10d._world.pg_group_ranks[group] = {place: place for place in range(size)}
    return group


def there(group: Any) -> bool:
    """Whether the process of a trainer, rank 0 of a group of `join`, is still there."""
    try:
        distributed_c10d._world.pg_map[group][1].num_keys()
    except RuntimeError:  # torch's DistNetworkError is one
        return False
    return True


def leave(group: Any) -> None:
    """Leaves a group of `join`."""
    dist.destroy_process_group(group)


def broadcast(group: Any, tensor: Tensor, root: int = 0) -> None:
    """Sends a tensor of `root` to all. Raises RuntimeError if a process of the group is gone."""
    how = dist.BroadcastOptions()
    how.rootRank, how.rootTensor = root, 0
    group.broadcast([tensor], how).wait()


def dtype_named(name: str) -> torch.dtype:
    """A dtype as trainers spell it. Raises ValueError."""
    found = vars(torch).get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r:.40} is not known; use a name of torch, such as bfloat16")
    return found


def received(
    group: Any, told: Sequence[tuple[str, torch.dtype, Sequence[int]]], device: torch.device, *, flat: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that rank 0 of a group sends. `flat`: the bytes of all, one after the other, in one broadcast."""
    if not flat:
        for name, dtype, shape in told:
            tensor = torch.empty(*shape, dtype=dtype, device=device)
            broadcast(group, tensor)
            yield name, tensor
        return
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in told]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    broadcast(group, whole)
    for (name, dtype, shape), part in zip(told, whole.split(sizes), strict=True):
        part = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        yield name, part.view(dtype).view(*shape)


def handle_of(name: str, tensor: Tensor) -> dict[str, Any]:
    """For the trainer: where a tensor on a card is, as JSON. It must stay until the update has ended."""
    _, given = reductions.reduce_tensor(tensor.detach())
    fields = (
        "shape", "stride", "offset", "storage", "dtype", "device", "handle", "storage_size", "storage_offset", "grad",
        "ref_counter", "ref_counter_offset", "event", "event_sync",
    )  # fmt: skip
    found = dict(zip(fields, given[1:], strict=True))
    found |= {key: found[key].hex() for key in HEX}
    found |= {"shape": [*found["shape"]], "stride": [*found["stride"]], "dtype": str(found["dtype"])[6:], "name": name}
    found["device"] = str(torch.cuda.get_device_properties(found["device"]).uuid)
    return {key: value for key, value in found.items() if key not in ("storage", "grad")}


def opened(told: Mapping[str, Any]) -> tuple[str, Tensor]:
    """The name and the tensor of a handle of this card. Raises ValueError."""
    cards = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    try:
        if (card := told["device"]) not in cards:
            raise ValueError(f"device={card!r:.60} of {told['name']!r:.80} is none of this process: {', '.join(cards)}")
        tensor = reductions.rebuild_cuda_tensor(
            Tensor, torch.Size(told["shape"]), tuple(told["stride"]), told["offset"], torch.UntypedStorage,
            dtype_named(told["dtype"]), cards.index(card), bytes.fromhex(told["handle"]), told["storage_size"],
            told["storage_offset"], False, bytes.fromhex(told["ref_counter"]), told["ref_counter_offset"],
            bytes.fromhex(told["event"]), told["event_sync"],
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"a handle of {told.get('name', '?')!r:.80} is not as handle_of makes it: {error!r}"
        ) from error
    return told["name"], tensor
