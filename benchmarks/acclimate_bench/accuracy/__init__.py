"""The accuracy of every method, against none and against recorded accuracies."""
