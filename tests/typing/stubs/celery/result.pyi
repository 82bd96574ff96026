from typing import Any, Generic, TypeVar

R = TypeVar("R", covariant=True)

class AsyncResult(Generic[R]):
    id: str
    def get(self, timeout: float | None = ..., **options: Any) -> R: ...

class EagerResult(AsyncResult[R]): ...
