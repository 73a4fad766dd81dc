"""The methods of the papers and their baselines, one file per paper, and the mathematics that they share."""
