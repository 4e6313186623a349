"""One file a paper: its formula, its settings with their sources, and the composition they stand for."""
