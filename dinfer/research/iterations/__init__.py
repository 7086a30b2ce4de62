"""Iterations of single papers."""
