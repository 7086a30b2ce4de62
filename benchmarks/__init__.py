"""Measurements. Each module is a command, `python -m benchmarks.NAME`, and writes JSON with its provenance."""
