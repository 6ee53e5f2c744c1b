"""One process a device: a ragged batch in, rows of vectors out."""
