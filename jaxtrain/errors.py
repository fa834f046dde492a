"""What can go wrong, and the exit code that says so. A message is one line: found, expected, what to do."""


class JaxtrainError(Exception):
    """An end of the run that is explained in one line, without a traceback."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it by this name): the line alone."""
        return [f"{type(self).__name__}: {self}"]


class UserError(JaxtrainError):
    """A mistake in the config, on the command line or in the data: nothing was written."""

    exit_code = 2


class NonFiniteError(JaxtrainError):
    """The loss, a gradient or the state was NaN or infinite, and the config says to stop. `step` where it is known."""

    exit_code = 3

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


class HangError(JaxtrainError):
    """Nothing progressed, or another process of the run is gone."""

    exit_code = 4


class StorageError(JaxtrainError):
    """A checkpoint or a report could not be written or read."""

    exit_code = 5
