"""Which steps a round of the engine takes. Host side."""
