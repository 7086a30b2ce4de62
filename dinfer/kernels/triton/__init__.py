"""Triton kernels behind the functions of `dinfer.kernels`; imported only where one is about to run."""
