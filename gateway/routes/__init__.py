"""One module an API dialect: a body to a request, a result to a body; no sockets."""
