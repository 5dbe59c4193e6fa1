"""`python -m turtlemq` is the `turtlemq` command."""

from turtlemq.cli import main

if __name__ == "__main__":
    main()
