"""Products with rounded weights, as torch references."""
