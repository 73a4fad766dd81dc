"""`balanced`, the method of this project: its mathematics, its passes, and what must be measured for it."""
