"""Text to token ids: single texts, pairs, and documents in chunks."""
