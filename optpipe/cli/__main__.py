"""``python -m optpipe.cli`` is ``optpipe``, for environments without scripts on the path."""

from optpipe.cli import main

if __name__ == "__main__":
    main()
