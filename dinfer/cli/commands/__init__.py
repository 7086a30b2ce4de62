"""One module per command: its docstring is its help, `run(args)` does it. `dinfer.cli.program` finds them here."""
