"""Abilities of single families."""
