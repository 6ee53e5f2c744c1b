"""First come, first served under a token budget: decides what runs where, and answers what cannot run."""
