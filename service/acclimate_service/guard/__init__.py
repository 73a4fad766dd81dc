"""Whether adaptation helps, judged by the true labels that somebody tells, and which model then answers."""
