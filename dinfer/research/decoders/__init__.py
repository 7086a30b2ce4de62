"""Decoders of single papers."""
