"""Formats of weights, one file each: how a weight is made, held and multiplied."""
