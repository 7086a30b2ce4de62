"""How the canvas is swept, and what the model is fed at masked positions."""
