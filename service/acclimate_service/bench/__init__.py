"""`acclimate bench accuracy`: every method on clients with a known shift, against recorded accuracies."""
