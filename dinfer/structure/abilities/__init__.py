"""What keeps answers within a language."""
