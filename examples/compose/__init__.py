"""What docker-compose.yml runs: the FastAPI example with servers, and what watches it."""
