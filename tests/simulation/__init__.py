"""A deterministic simulator: clients of one ledger, one statement at a time, in a seeded order."""
