"""How a token is drawn from the logits. One registry; `dinfer.recipe.registry.SAMPLINGS`."""
