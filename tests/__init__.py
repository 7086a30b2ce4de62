"""The tests, and `tests.parity`, which is a command."""
