"""The command line: a Hydra application with one file per command. Nothing imports this package."""
