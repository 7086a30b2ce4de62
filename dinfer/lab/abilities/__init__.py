"""Abilities that look at steps."""
