"""The gateway's handling of connections, before and after a request: HTTP, limits, keys, memory, CORS."""
