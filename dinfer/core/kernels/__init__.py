"""Tensor functions with one contract each: a torch reference, and for some a Triton kernel behind the same name."""
