"""What the three processes share: the protocol, its sockets, errors, configuration, metrics and tokenization."""
