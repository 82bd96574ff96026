"""Ask for drafts over HTTP, as a client would; see README.md."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from examples import local
from examples.fastapi import front


@contextmanager
def server() -> Iterator[str]:
    """Run the front in uvicorn, on a port that is free; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor = listening.fileno()
        with local.process(
            "front",
            *("uvicorn", "examples.fastapi.front:api", "--fd", str(descriptor)),
            pass_fds=[descriptor],
        ):
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def ask(client: httpx.Client, prompt: str, pages: int, key: str | None = None) -> httpx.Response:
    """Ask for a draft."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post("/drafts", params={"prompt": prompt, "pages": pages}, headers=headers)


def told(answer: httpx.Response) -> str:
    """Return what a refusal tells."""
    found = answer.json()
    after = answer.headers.get("Retry-After")
    later = "without Retry-After" if after is None else "with Retry-After"
    return f"{answer.status_code} {found['error']} ({found['reason']}), {later}"


def refused(answer: httpx.Response) -> str:
    """Return what the front tells by itself."""
    return f"{answer.status_code} {answer.json()['detail']}"


def before_work(acme: httpx.Client, zeta: httpx.Client) -> tuple[str, str]:
    """Ask while no worker runs; return a short draft and a long one that were accepted."""
    first = ask(acme, "A haiku", 2, key="order-1")
    print(f"a haiku: {first.status_code}")
    again = ask(acme, "A haiku", 2, key="order-1")
    print(f"the same order: {again.status_code}, the same draft: {again.json() == first.json()}")
    novel = ask(acme, "A novel", 500)
    print(f"a novel: {novel.status_code}")
    letter = ask(acme, "A letter", 7)
    print(f"a letter: {letter.status_code}")
    print(f"a poem: {told(ask(acme, 'A poem', 3))}")
    print(f"a library: {told(ask(acme, 'A library', 9_000))}")
    cancelled = acme.delete(letter.headers["Location"]).json()["cancel"]
    print(f"the letter, cancelled: {cancelled}, {acme.get(letter.headers['Location']).json()}")
    print(f"a poem: {ask(acme, 'A poem', 3).status_code}")
    print(f"the haiku, asked for by another: {zeta.get(first.headers['Location']).status_code}")
    print(f"its text: {refused(acme.get(first.headers['Location'] + '/text'))}")
    return first.headers["Location"], novel.headers["Location"]


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder:
        local.keep_in(front.app, folder)
        front.budget.init()
        front.budget.set("tenant:acme", limit=51_000, unit="tokens")
        front.budget.set("tenant:zeta", limit=1_000, unit="tokens")
        try:
            with server() as url, clients(url) as (acme, zeta):
                haiku, novel = before_work(acme, zeta)
                with local.worker("examples.fastapi.front") as worker:
                    worker.wait(lambda: acme.get(novel).json()["progress"])
                    print(f"the novel is {acme.get(novel).json()['state']}")
                    print(f"cancelled: {acme.delete(novel).json()['cancel']}")
                    worker.wait(lambda: acme.get(novel).json()["state"] == "cancelled")
                    worker.wait(lambda: local.closed(front.budget))
                    print(f"the novel's text: {refused(acme.get(f'{novel}/text'))}")
                    print(f"the haiku: {acme.get(f'{haiku}/text').json().splitlines()}")
                    print(f"cancelled: {refused(acme.delete(haiku))}")
                    used = acme.get(novel).json()["used"]
                    print(f"the novel was charged for less than half of it: {0 < used < 22_500}")
                    spent = acme.get("/budget").json()["spent"]
                    print(f"spent by the others: {spent - used} tokens")
            return local.verdict(front.budget)
        finally:
            front.budget.store.dispose()


@contextmanager
def clients(url: str) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Give a client of each tenant."""
    with client(url, "key-of-acme") as acme, client(url, "key-of-zeta") as zeta:
        yield acme, zeta


def client(url: str, key: str) -> httpx.Client:
    """Return the client of one tenant."""
    return httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60, trust_env=False)


if __name__ == "__main__":
    local.run(main)
