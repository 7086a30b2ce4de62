"""Languages on the device."""
