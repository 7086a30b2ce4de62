"""Building blocks of networks: torch modules that know nothing of canvases, pages or decoders."""
