"""Topics and groups for operators."""
