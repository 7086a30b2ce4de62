"""One module per command: its docstring is its help, `run(args)` does it. `dinfer.cli.main` finds them here."""
