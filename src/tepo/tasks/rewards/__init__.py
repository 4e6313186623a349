"""Scorers of responses; what runs model text through a parser or a foreign scorer lives in worker processes."""
