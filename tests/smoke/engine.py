"""Which way the smoke tests go: containers where a Docker engine answers, processes elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping

import docker
import requests
from pytest_docker_tools.utils import tests_inside_container

__all__ = ["CONTAINERS", "PROCESSES", "VARIABLE", "answers", "chosen"]

VARIABLE = "BUDGET_SMOKE"
CONTAINERS = "containers"
PROCESSES = "processes"
#: Seconds that an engine has to answer in.
PATIENCE = 5


def answers(patience: float = PATIENCE) -> bool:
    """Whether the engine that ``DOCKER_HOST`` names, or the system's own, answers a ping."""
    try:
        # Asks for the engine's version already, and raises where there is none.
        client = docker.from_env(timeout=patience)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return False
    finally:
        client.close()


def chosen(environment: Mapping[str, str] = os.environ) -> str:
    """Return ``containers`` or ``processes``: as the variable says, or else as the engine does.

    From within a container no engine is asked: pytest-celery looks for published ports on its own
    host.

    :raises ValueError: where the variable says anything else.
    """
    asked = environment.get(VARIABLE) or None
    if asked is None:
        return CONTAINERS if not tests_inside_container() and answers() else PROCESSES
    if asked not in (CONTAINERS, PROCESSES):
        raise ValueError(f"{VARIABLE} is {asked!r}: it may be {CONTAINERS!r} or {PROCESSES!r}")
    return asked
