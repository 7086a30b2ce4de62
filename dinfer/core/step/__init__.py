"""One denoising step: canvas, contracts, plan, window, forward, decision."""
