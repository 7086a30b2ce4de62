"""The `dinfer` command."""

import sys


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exit status: 0; 2 for bad input, 1 for a failure, 130 when interrupted."""
    try:
        from dinfer.cli.program import run
    except KeyboardInterrupt:  # while modules are loaded, which takes longer than all else here
        raise SystemExit(130) from None
    run(sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    main()
