"""What brokers and clients say to each other: frames, messages and the connection's state machine, pure."""
