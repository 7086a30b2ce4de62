"""What the tests of the core share: tiny models, scripted logits, the matrix of recipes, a second host loop."""
