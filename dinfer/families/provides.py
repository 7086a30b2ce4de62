"""What core and other layers get from this one, see `dinfer.core.provided`."""

from dinfer.families.hub import FETCHED, datasets_of, download, fetched, snapshot_of

__all__ = ["FETCHED", "datasets_of", "download", "fetched", "snapshot_of"]
