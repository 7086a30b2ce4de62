"""Abilities that only a server asks for."""
