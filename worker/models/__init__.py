"""The models: families, the layers that they share, their heads, and what follows the last layer."""
