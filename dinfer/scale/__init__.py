"""Several processes and machines. Optional."""
