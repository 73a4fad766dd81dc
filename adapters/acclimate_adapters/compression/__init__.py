"""States in fewer bytes."""
