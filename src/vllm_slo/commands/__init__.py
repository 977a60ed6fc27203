"""The command line: one command a file, wired to the four packages; ``COMMANDS`` in ``commands.group`` lists them."""
