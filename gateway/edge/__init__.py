"""What a gateway does with a connection before and after a request: limits, keys, memory, CORS."""
