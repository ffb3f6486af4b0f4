"""Plain values: names, digests, manifests, states. No I/O."""
