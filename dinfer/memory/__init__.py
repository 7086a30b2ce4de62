"""Keys and values, in pages."""
