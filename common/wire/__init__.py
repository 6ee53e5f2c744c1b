"""The messages between the processes, their bytes, and the sockets that carry them."""
