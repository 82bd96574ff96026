from typing import Any, Generic, TypeVar

from celery.result import AsyncResult

R = TypeVar("R", covariant=True)

class Signature(Generic[R]):
    def apply_async(self, args: Any = ..., kwargs: Any = ..., **options: Any) -> AsyncResult[R]: ...
