"""A model and four choices, their registry, and which of them exclude each other."""
