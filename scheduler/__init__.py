"""First come, first served under a token budget: decides what runs where, and who answers when it cannot."""
