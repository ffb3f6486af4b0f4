"""Where bytes rest: one protocol, and the stores that speak it."""
