"""`python -m cutaway`: the command line."""

from cutaway.cli import main

main()
