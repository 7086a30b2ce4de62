"""Which cases this run is to make: what `-m` asks for, as conftest.py finds it before any test is collected."""

matrix = True  # whether cases that are marked `matrix` may run
