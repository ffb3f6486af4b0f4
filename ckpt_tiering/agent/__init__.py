"""The process beside training that takes staged saves to the store."""
