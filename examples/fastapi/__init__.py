"""A FastAPI front for budgeted work: ``make example NAME=fastapi``."""
