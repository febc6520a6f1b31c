"""``python -m millipode`` is ``millipode``."""

from millipode.cli import main

if __name__ == "__main__":
    main()
