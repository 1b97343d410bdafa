"""The one exception that means "the user can fix this": the CLI prints it and exits with 2."""


class LlmemError(Exception):
    """A problem in the input, said in one sentence that names the cause and the next step."""
