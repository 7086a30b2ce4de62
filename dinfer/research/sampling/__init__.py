"""Samplings of single papers."""
