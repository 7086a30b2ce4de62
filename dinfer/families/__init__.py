"""Families of checkpoints beyond those of the models in the box. Optional."""
