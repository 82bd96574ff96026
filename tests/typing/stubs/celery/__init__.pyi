from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from celery.app.task import Task as Task

P = ParamSpec("P")
R = TypeVar("R")

class Celery:
    conf: Any
    tasks: dict[str, Task[..., Any]]
    def __init__(self, main: str | None = ..., **options: Any) -> None: ...
    @overload
    def task(self, fun: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]: ...

def shared_task(fun: Callable[P, R], /) -> Task[P, R]: ...
