"""What we test with, shipped: a store contract, faulty stores, a fake clock."""
