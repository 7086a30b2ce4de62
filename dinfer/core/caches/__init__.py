"""Which keys and values are recomputed, seen and refreshed."""
