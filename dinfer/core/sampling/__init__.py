"""How a token is drawn from the logits. One registry; `dinfer.core.registry.SAMPLINGS`."""
