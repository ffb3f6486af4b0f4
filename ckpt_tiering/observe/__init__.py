"""What happened, and how far durability lags behind."""
