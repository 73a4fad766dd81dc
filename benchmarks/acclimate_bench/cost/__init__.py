"""What adapting costs: of a step, of serving, of keeping the state; each a command of `acclimate-bench`."""
