"""The accuracy that is left when stored states are given fewer bytes."""
