"""Components and abilities of single papers. Optional."""
