"""A context variable that has another value for a while."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Generic, TypeVar


Value = TypeVar("Value")


class Setting(Generic[Value]):
    """The variable has the value inside; entered again any number of times, as a kept graph computes again."""

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable = variable
        self._value = value
        self._tokens: list[Token[Value]] = []

    def __enter__(self) -> Value:
        self._tokens.append(self._variable.set(self._value))
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._tokens.pop())
