"""`python -m tepo` is the command `tepo`."""

from tepo.cli import main

if __name__ == "__main__":
    main()
