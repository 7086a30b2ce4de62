"""Tensor functions with one contract each: a plain torch reference, and later a kernel behind the same name."""
