"""What makes the same tokens come sooner. Optional."""
