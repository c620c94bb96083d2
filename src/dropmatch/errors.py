"""Every error that dropmatch raises on purpose. Each message says what to change."""


class DropMatchError(Exception):
    """Base of all errors raised by dropmatch."""


class SettingError(DropMatchError, ValueError):
    """A setting is unknown, out of range, or cannot be honoured together with another one."""


class ModelError(DropMatchError, RuntimeError):
    """A model cannot be found, fetched, trusted, converted or used for what was asked."""
