"""The host side: requests in, steps launched, completions out."""
