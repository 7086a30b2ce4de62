"""Formats of rounded weights, a file each."""
