"""One suite over the ledger: every store passes the same tests."""
