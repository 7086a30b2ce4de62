"""Which positions are committed at each step."""
