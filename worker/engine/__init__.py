"""One step on the device: a batch in, rows out."""
