"""The sections of the overview page, one a file, each drawn from one ``View``."""
