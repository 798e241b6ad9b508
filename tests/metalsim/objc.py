"""PyObjC's module `objc`: what a driver of Metal needs of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class ObjcModule(ModuleType):
    def __init__(self) -> None:
        super().__init__("objc")
        self.metadata: dict[bytes, dict[str, Any]] = {}  # told by registerMetaDataForSelector
        self.pools = 0  # that are open

    @contextmanager
    def autorelease_pool(self) -> Iterator[None]:
        self.pools += 1
        try:
            yield
        finally:
            self.pools -= 1

    def registerMetaDataForSelector(  # noqa: N802
        self, class_name: bytes, selector: bytes, metadata: dict[str, Any]
    ) -> None:
        self.metadata[selector] = metadata
