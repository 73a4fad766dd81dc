"""`acclimate-bench`: every method on clients with a known shift, against recorded accuracies and with the guard."""
