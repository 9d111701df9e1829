"""Who may ask the dashboard, and what may listen."""
