from typing import Any, Generic, ParamSpec, TypeVar

from celery.result import AsyncResult

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

class Task(Generic[P, R]):
    name: str
    request: Any
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]: ...
    def apply_async(self, args: Any = ..., kwargs: Any = ..., **options: Any) -> AsyncResult[R]: ...
