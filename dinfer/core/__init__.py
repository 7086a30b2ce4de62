"""The contracts, the canvas and the denoise step: everything a component may rely on."""
