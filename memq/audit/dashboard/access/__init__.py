"""Access to the dashboard: its login, its cookies, and the addresses that it may listen on."""
