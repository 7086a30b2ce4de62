"""Turns an autoregressive Llama or Qwen checkpoint into a block-diffusion one. See `__main__`."""
