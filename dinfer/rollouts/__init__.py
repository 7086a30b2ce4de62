"""Training by what was generated: samples with all that a trainer needs, and weights that change under an engine."""
