"""What a model's folder declares, read without torch."""
