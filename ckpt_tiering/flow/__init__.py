"""How fast, and how often again."""
