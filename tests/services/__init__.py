"""Real servers that the tests own: PostgreSQL, Redis and RabbitMQ on free loopback ports.

Each one lives in its own temporary folder, can be killed like a machine that lost power, comes back
on the same port with the same data, and leaves no process and no folder behind, even where the test
run itself is killed (see `guardian`).
"""
