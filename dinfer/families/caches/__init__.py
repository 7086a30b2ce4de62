"""Caches of single families."""
