"""Kernels in Triton and in C behind the functions of `dinfer.core.kernels`. Optional."""
