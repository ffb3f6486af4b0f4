"""The agent's memory, on the NVMe."""
