"""The worker as a process: its socket, its state machine, its threads, its cores and memory."""
