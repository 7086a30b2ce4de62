"""Caches of single papers."""
