"""How a run ends other than by finishing: always with one sentence, never with a traceback."""


class UsageError(Exception):
    """What was asked for cannot be done; the message is one sentence that says what would work."""

    exit_code = 2


class TooFewEntriesError(UsageError):
    """The text does not support a vocabulary of that size.

    Attributes:
        entries: how many it supports.
    """

    def __init__(self, message: str, entries: int) -> None:
        super().__init__(message)
        self.entries = entries


class RunError(Exception):
    """The run itself failed after a valid start, for instance by a loss that is not finite."""

    exit_code = 1


class Stopped(Exception):
    """The run ended early on purpose; the message says what was saved.

    Attributes:
        exit_code: 0 where the command asked for it, 128 plus the signal's number where a signal did.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
