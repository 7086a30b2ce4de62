"""Decoders of single families."""
