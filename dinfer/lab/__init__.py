"""What runs are worth: accuracy, forwards, drift of cached logits, likelihood, and how a canvas was denoised."""
