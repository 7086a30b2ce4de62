"""What core gets from this layer, see `dinfer.core.provided`."""

ADDRESSES = {
    "layers": "dinfer.kernels.cpu.layers:layers",
    "symmetric_sum": "dinfer.kernels.symmetric:SymmetricSum.of",
}
