"""How many cards a load needs: a simulator of engines on many cards, with measured step times."""
