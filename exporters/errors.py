"""The one root of every error this project raises on purpose."""


class SloError(Exception):
    """What went wrong, for the person who can mend it: where, what was found, what is allowed, the cure."""
