"""What core gets from this layer, see `dinfer.core.provided`."""

ADDRESSES = {
    "symmetric_sum": "dinfer.kernels.symmetric:SymmetricSum.of",
}
