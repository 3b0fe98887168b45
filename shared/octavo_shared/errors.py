"""Errors that rooms share. Nothing else, so that whoever raises one needs nothing else."""


class SettingError(ValueError):
    """A setting is wrong; the message names it."""
