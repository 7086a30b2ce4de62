"""Abilities that save work."""
