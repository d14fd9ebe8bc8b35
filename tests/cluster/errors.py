"""The one exception of the bed: something a person has to know or to do."""


class BedError(Exception):
    """Says what is wrong and what to do about it. The command line prints it without a traceback."""
