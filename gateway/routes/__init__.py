"""One module an API dialect: body → request, result → body. No sockets here, and no dialect knows another."""
