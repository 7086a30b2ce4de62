"""Iterations of single families."""
