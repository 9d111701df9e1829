"""Questions of the live audit to brokers, owners and stores before it takes a report or names a loss."""
