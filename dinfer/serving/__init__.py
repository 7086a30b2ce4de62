"""An OpenAI-compatible HTTP server over the engine, and the page it shows to people."""
