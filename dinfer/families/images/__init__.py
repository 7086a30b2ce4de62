"""Images in prompts: files, the vision tower, and conversations with image parts."""
