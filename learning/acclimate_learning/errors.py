"""What can go wrong before deployment."""

from acclimate_adapters.errors import AcclimateError


class LearningError(AcclimateError):
    """Clients cannot be made, rates cannot be learned, or nothing can be judged; the message says what to do."""
