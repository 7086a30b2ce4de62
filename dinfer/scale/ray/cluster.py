"""Joins a Ray cluster, and checks whether it has room for the replicas."""

import logging
import os
import socket
from functools import partial
from pathlib import Path

import ray

AUTO, LOCAL = "auto", "local"
TOKEN = Path.home() / ".ray" / "auth_token"
ANSWER = 5.0  # seconds in which the head of a cluster must take a connection


def connect(address: str, *, logs: bool, private: bool = False) -> None:
    """Joins the cluster at `address`. `logs`: show the output of its processes here.

    `auto` means the cluster of RAY_ADDRESS, or one that runs on this machine, or a new one here, which ends with this
    process. `private`: start none, since the ports of Ray's processes can be reached from other machines. Raises
    ValueError if there is none.
    """
    logging.getLogger("ray").setLevel(logging.WARNING)
    if ray.is_initialized():
        return
    found = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    reachable(found)
    start = partial(ray.init, log_to_driver=logs, logging_level=logging.WARNING)
    try:
        if address != LOCAL:
            try:
                start(address)
                return
            except ConnectionError:
                if address != AUTO:
                    raise
        if private:
            raise ValueError(
                "no cluster runs, and the processes of a new one listen on all addresses of this machine, with "
                "Ray's token as their only guard. Say insecure=true to start one, or join one with ray=HOST:PORT"
            )
        start(LOCAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"ray={address}: no Ray cluster can be joined there: {error}") from error
    finally:
        if TOKEN.exists():
            TOKEN.chmod(0o600)  # Ray lets everybody on this machine read it


def reachable(address: str) -> None:
    """Raises ValueError if nothing listens at HOST:PORT. Ray itself says so only after a minute."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise ValueError(f"ray={address}: run this command on a machine of the cluster, with ray=auto or HOST:PORT")
    if not colon:
        if address not in ("", LOCAL):
            raise ValueError(f"ray={address} must be auto, local, or the HOST:PORT of a cluster's head")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"ray={address}: no Ray cluster answers there ({error}). `ray status` shows where one runs, and ray=auto "
            "finds it, or starts one on this machine"
        ) from error


def device_of(device: str | None) -> str:
    """Where replicas compute: `device`, or CUDA if the cluster has cards. Raises ValueError."""
    if device and ":" in device:
        raise ValueError(f"device={device} names one card, and Ray chooses each replica's: leave the number out")
    return device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")


def placed(replicas: int | None, ranks: int, device: str) -> tuple[int, dict[str, float]]:
    """The number of replicas, and the resources of one: a core and a card for each rank. ValueError for too many.

    `replicas`: None asks for as many as the cards allow, or for one on each machine without cards.
    """
    kind, what = ("GPU", "cards") if device == "cuda" else ("CPU", "cores")
    counts = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
    room = sum(int(count // ranks) for count in counts)
    replicas = replicas or (room if device == "cuda" else len(counts))
    if not 0 < replicas <= room:
        raise ValueError(
            f"replicas={replicas} with runtime.tensor_parallel={ranks}: each replica needs {ranks} of a machine's "
            f"{what}, and the Ray cluster, with {int(sum(counts))} {what} in {len(counts)} machines, has room for "
            f"{room}. Ask for fewer, or add machines to the cluster"
        )
    return replicas, {"CPU": ranks, **({"GPU": ranks} if device == "cuda" else {})}
