"""A client's life: its batches, its configuration, its labels, its state taken out and put in."""
