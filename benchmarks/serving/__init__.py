"""Benchmarks and checks of `dinfer serve` with real clients, a browser and heavy load."""
