"""What core gets from this layer, see `dinfer.core.provided`."""

from dinfer.families.hub import download, fetched, snapshot_of

__all__ = ["download", "fetched", "snapshot_of"]
