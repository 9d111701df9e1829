"""The protocol of brokers and clients: frames, messages, states of a connection. Pure."""
