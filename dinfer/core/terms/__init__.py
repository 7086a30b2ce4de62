"""Data that kernels and the step share."""
