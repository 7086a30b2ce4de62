"""Likelihood estimators, a file for each idea."""
