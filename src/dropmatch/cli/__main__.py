"""`python -m dropmatch.cli`."""

from dropmatch.cli import main

main()
