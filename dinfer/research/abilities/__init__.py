"""Abilities of single papers."""
