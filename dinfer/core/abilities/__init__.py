"""Optional features of a step, a file each. The step asks them and names none."""
