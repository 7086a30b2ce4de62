"""References of kernels that components of single papers need."""
