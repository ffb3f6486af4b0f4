"""The step loop's share of a save. The only part of the core, with `dcp`, that knows torch."""
