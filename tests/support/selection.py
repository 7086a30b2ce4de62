"""What this run is to make, as conftest.py reads it from the command line before any test is collected."""

every_recipe = False  # all legal recipes, not a part of them in which every pair of components occurs
