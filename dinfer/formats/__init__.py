"""Checkpoints in other formats than plain safetensors. Optional."""
