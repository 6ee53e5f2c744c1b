"""The HTTP front: parses, tokenizes, splits and renders; holds a request until it has answered it."""
