"""Every error the algorithms raise.

AcclimateError
├── ConfigurationError       a hyper-parameter, a network or a source quantity cannot be used
│   ├── UnknownAdapter       no adapter has that name
│   └── MissingSource        the adapter needs something the model does not carry
├── InputError               the batch cannot be used; the state is what it was
├── StateError
│   ├── StateMismatch        the state was made for another adapter, layout or model
│   └── StateCorrupt         the bytes are not a state
└── NumericalError           the model answered with non-finite numbers
"""


class AcclimateError(Exception):
    """Root of all errors raised by the algorithms and the model store."""


class ConfigurationError(AcclimateError, ValueError):
    """A hyper-parameter, a network or a source quantity cannot be used."""


class UnknownAdapter(ConfigurationError):
    """No adapter has that name."""


class MissingSource(ConfigurationError):
    """The adapter needs something the model does not carry."""


class InputError(AcclimateError, ValueError):
    """The batch cannot be used; the state is what it was."""


class StateError(AcclimateError):
    """A client's state cannot be used."""


class StateMismatch(StateError):
    """The state was made for another adapter, layout or model; it is never reinterpreted."""


class StateCorrupt(StateError):
    """The bytes are not a state."""


class NumericalError(AcclimateError):
    """The model answered with non-finite numbers."""
