"""Which skip tensors of one name are meant."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True)
class Namespace:
    """Tells equal names of skip tensors apart: `module.isolate(namespace)`.

    A value: copies are equal, two made separately never are.
    """

    identity: UUID = field(default_factory=uuid4)


# A skip tensor: its namespace, None unless the module was isolated, and its name.
Key = tuple[Namespace | None, str]
