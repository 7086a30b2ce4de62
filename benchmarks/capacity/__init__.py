"""How many cards a load takes: a simulator of engines on many cards, fed with measured step times."""
