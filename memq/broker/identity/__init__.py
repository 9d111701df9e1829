"""Identity of connections: certificates, signed tokens, and the networks of a broker."""
