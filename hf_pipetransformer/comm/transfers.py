"""Batched point-to-point transfers, JSON messages as tensors, and moves of many tensors in rounds.

All transfers are posted in a batch, even single ones. On NCCL, an unbatched transfer makes a communicator for its two
ranks, which blocks the host until the other rank joins; a batch uses its group's communicator, which an earlier
collective has made. The first transfer of a pair in one direction still connects them and may block both hosts, so a
link is rehearsed when it is made.

Moves run in rounds with bounded memory. All ranks go through the same rounds in the same order and post all transfers
of a round at once. A rank waits only for ranks in the same or an earlier round, so waits cannot form a cycle.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from hf_pipetransformer.comm.errors import guarded, present_limit, wait_for


T = TypeVar("T")


def plain(value: Any, what: str) -> Any:
    """Return `value` in the form it has after a JSON round trip.

    Raises:
        ValueError: it contains something JSON cannot store.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    raise ValueError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: nothing is pickled, so only tensors, "
        "numbers, texts, lists and dicts with names can be saved. Use another optimizer, scheduler or policy, or "
        "set save_only_model=True."
    )


_KINDS: dict[str, type] = {}


def sendable(kind: type[T]) -> type[T]:
    """Let objects of a class be sent: its attributes, which its constructor takes, and, of a dict, its `inputs`."""
    _KINDS[kind.__name__] = kind
    return kind


# The size of an element of complex128, the largest dtype.
_ALIGNMENT = 16
_HEADER_BYTES = 8


def pack(tree: Any) -> torch.Tensor:
    """Serialize nested dicts, lists, tuples and `sendable` objects of tensors and JSON values into a `uint8` tensor.

    A tensor whose elements all share one memory cell (an expanded placeholder) is stored as that single element.

    Raises:
        TypeError: a leaf is neither a tensor nor a JSON value.
    """
    # Filled by `_describe` in the order in which `unpack` meets the tensors.
    chunks: list[torch.Tensor] = []
    description = _describe(tree, chunks)
    header = json.dumps(description).encode()
    start = _aligned(_HEADER_BYTES + len(header))
    sizes = [chunk.numel() for chunk in chunks]
    message = torch.zeros(start + sum(_aligned(size) for size in sizes), dtype=torch.uint8)
    # Layout: header length, JSON header, then the tensors' bytes, aligned because `view(dtype)` needs it.
    message[:_HEADER_BYTES].view(torch.int64)[0] = len(header)
    # A bytearray, because `torch.frombuffer` warns about read-only memory.
    message[_HEADER_BYTES : _HEADER_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for chunk, size in zip(chunks, sizes, strict=True):
        message[start : start + size] = chunk
        start += _aligned(size)
    return message


def unpack(message: torch.Tensor) -> Any:
    """Rebuild the tree that `pack` serialized. Its tensors are views into `message`."""
    header_size = int(message[:_HEADER_BYTES].view(torch.int64)[0])
    header = bytes(message[_HEADER_BYTES : _HEADER_BYTES + header_size].numpy())
    position = _aligned(_HEADER_BYTES + header_size)

    def build(node: dict[str, Any]) -> Any:
        nonlocal position
        if "t" in node:
            dtype, shape, is_placeholder = getattr(torch, node["t"]), torch.Size(node["s"]), node["p"]
            size = (1 if is_placeholder else shape.numel()) * dtype.itemsize
            tensor = message[position : position + size].view(dtype)
            position += _aligned(size)
            return tensor.expand(shape) if is_placeholder else tensor.view(shape)
        if "k" in node:
            return _KINDS[node["k"]](**build(node["f"]))
        if "d" in node:
            return {key: build(value) for key, value in node["d"]}
        if "l" in node:
            return [build(value) for value in node["l"]]
        return tuple(build(value) for value in node["u"]) if "u" in node else node["v"]

    return build(json.loads(header))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _describe(tree: Any, chunks: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach().cpu()
        is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
        shape = list(tensor.shape)
        # Its elements are one memory cell, so this one says everything.
        if is_placeholder:
            tensor = tensor.as_strided((1,), (1,))
        flat = tensor.contiguous().reshape(-1)
        if flat.numel() == 1:
            flat = flat.as_strided((1,), (1,))  # A column of one row counts as contiguous whatever its stride.
        chunks.append(flat.view(torch.uint8))
        return {"t": str(tensor.dtype).removeprefix("torch."), "s": shape, "p": is_placeholder}
    if _KINDS.get(type(tree).__name__) is type(tree):
        inputs = {"inputs": dict(tree)} if isinstance(tree, dict) else {}
        return {"k": type(tree).__name__, "f": _describe(inputs | vars(tree), chunks)}
    if isinstance(tree, Mapping):
        return {"d": [[key, _describe(value, chunks)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"l" if isinstance(tree, list) else "u": [_describe(value, chunks) for value in tree]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"v": tree}
    raise TypeError(
        f"A batch or model output holds a {type(tree).__name__}, which cannot be sent to the other pipeline stages: "
        "expected tensors, numbers, strings, None, or dicts, lists and tuples of these. Remove it in the collator."
    )


# Far above the tags of other transfers, which are 0 throughout.
_CLOSING_TAG, _MOMENT = 2**20, timedelta(milliseconds=1)

Transfer = dist.P2POp
"""One tensor that this rank sends or receives."""


def sending(tensor: torch.Tensor, peer: int, group: Any) -> Transfer:
    """Return the send of a contiguous `tensor` to global rank `peer`. It must stay unchanged until sent."""
    return dist.P2POp(dist.isend, tensor, peer, group)


def receiving(tensor: torch.Tensor, peer: int, group: Any) -> Transfer:
    """Return the receive of global rank `peer`'s next message into a contiguous `tensor`."""
    return dist.P2POp(dist.irecv, tensor, peer, group)


def with_tensor(like: Transfer, tensor: torch.Tensor) -> Transfer:
    """Return the transfer of another tensor on the way of `like`."""
    # Not a call of `P2POp`, whose search for the ranks takes as long as the transfer's start.
    transfer = object.__new__(Transfer)
    vars(transfer).update(vars(like), tensor=tensor)
    return transfer


def post(transfers: Sequence[Transfer]) -> list[Any]:
    """Start a batch of transfers on one group. There are no tags: messages between two ranks match by order.

    Transfers of one call do not wait for each other. Two calls on one group run one after the other on both ranks, so
    an exchange must be in a single call on each rank, or use two groups. The group must have run a collective before.

    Returns:
        Handles, all of which must be waited on: one per call on NCCL, one per transfer on gloo.
    """
    assert len({id(transfer.group) for transfer in transfers}) <= 1, "one batch is one group's"
    if not transfers:
        return []
    if not _goes_through_host(transfers[0]):
        return dist.batch_isend_irecv(list(transfers))
    staged = [_Staged(transfer) for transfer in transfers]
    # gloo returns a handle for each transfer, in their order.
    for each, work in zip(staged, dist.batch_isend_irecv([each.on_host for each in staged]), strict=True):
        each.work = work
    return list(staged)


def _goes_through_host(transfer: Transfer) -> bool:
    """Return True if the transfer needs a host copy: gloo with GPU tensors, as NCCL refuses two ranks on one GPU."""
    return not transfer.tensor.is_cpu and dist.get_backend(transfer.group) == "gloo"


class _Staged:
    """Transfer through a copy in host memory; a received tensor is on the device after `wait`."""

    def __init__(self, transfer: Transfer) -> None:
        self._arrives = transfer.op.__name__ == "irecv"
        self._tensor = transfer.tensor
        host = torch.empty_like(self._tensor, device="cpu") if self._arrives else self._tensor.to("cpu", copy=True)
        self.on_host = dist.P2POp(transfer.op, host, transfer.peer, transfer.group)
        self.work: Any = None

    def wait(self, *limit: Any) -> bool:
        is_done: bool = self.work.wait(*limit)
        if self._arrives:
            self._tensor.copy_(self.on_host.tensor)
        return is_done


def complete(transfers: Sequence[Transfer], timeout: float | None, what: str) -> None:
    """Post transfers and wait for them, with a timeout in seconds for each on CPU tensors.

    On a GPU, the wait only orders the current stream after the transfers and does not block the host.

    Raises:
        PeerLostError: the other rank died, or the timeout passed; `what` names the transfer.
    """
    on_cpu = all(transfer.tensor.is_cpu for transfer in transfers)
    # All are under way before the first wait, so two ranks that send to each other do not wait for ever.
    for work in guarded(lambda: post(transfers), what):
        wait_for(work, timeout if on_cpu else None, what)


def close_connections(group: Any) -> None:
    """Close this rank's connections in a gloo group, whose own `abort` does nothing: waits in it end with an error.

    A receive that runs into its time limit does so. It has a tag of its own, lest a message arrives in time.
    """
    peer = next((rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()), None)
    if peer is not None:
        with suppress(RuntimeError):
            post([dist.P2POp(dist.irecv, torch.zeros(1), peer, group, _CLOSING_TAG)])[0].wait(_MOMENT)


def digest_of(tensor: torch.Tensor) -> str:
    """Return 32 hex digits over dtype, shape and bytes. Memory-mapped weights are read, not copied."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    hasher = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hasher.update(data.data)
    return hasher.hexdigest()


class ObjectSender:
    """Messages in transit. Keeps their tensors alive until they are sent; each may take `timeout` seconds."""

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout = timeout
        self.what = what
        self._leaving: deque[list[tuple[Any, tuple[torch.Tensor, ...]]]] = deque()

    def isend(self, tree: Any, peers: Iterable[int], group: Any) -> None:
        """Start sending a tree to some ranks of a gloo `group`, which receive it with `recv_object`."""
        message = pack(tree)
        # The size goes first, because the receiver allocates by it; nobody waits in between.
        tensors = (torch.tensor([message.numel()]), message)
        works = [work for peer in peers for work in post([sending(tensor, peer, group) for tensor in tensors])]
        self._leaving.append([(work, tensors) for work in works])

    def flush(self, num_kept: int = 0) -> None:
        """Wait for all sends except those of the last `num_kept` trees."""
        while len(self._leaving) > num_kept:
            for work, _tensors in self._leaving.popleft():
                wait_for(work, self.timeout, self.what)


def recv_object(source: int, group: Any, what: str) -> Any:
    """Receive the next tree that rank `source` sends to this one; `what` names it in errors."""
    size = torch.zeros(1, dtype=torch.int64)
    complete([receiving(size, source, group)], present_limit(), what)
    message = torch.empty(int(size), dtype=torch.uint8)
    complete([receiving(message, source, group)], present_limit(), what)
    return unpack(message)


def broadcast(tensor: torch.Tensor, source: int, group: Any, what: str) -> None:
    """Broadcast the tensor of global rank `source`; `what` names it in errors, which say what this rank was doing."""
    does = f"sending {what} to other ranks" if dist.get_rank() == source else f"receiving {what} from rank {source}"
    guarded(lambda: dist.broadcast(tensor, src=source, group=group), does)


def broadcast_tree(value: Any, source: int, group: Any, rank: int) -> Any:
    """Return the `value` of global rank `source` on every rank of a gloo `group`; the source keeps its own object."""
    if group is None:
        return value
    message = pack(value) if rank == source else None
    size = torch.tensor([0 if message is None else message.numel()])
    broadcast(size, source, group, "a message")
    if message is None:
        message = torch.empty(int(size), dtype=torch.uint8)
    broadcast(message, source, group, "a message")
    return value if rank == source else unpack(message)


def all_gather_trees(value: Any, group: Any, group_size: int) -> list[Any]:
    """Return every rank's `value`, by rank in a gloo `group`."""
    if group is None:
        return [value]
    message, what = pack(value), "gathering messages of all ranks"
    sizes = gather_rows(torch.tensor([message.numel()]), [1] * group_size, group, what)
    return list(map(unpack, gather_rows(message, list(map(int, sizes)), group, what)))


def reduced(values: torch.Tensor, group: Any, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a tensor in place over the ranks of a group, if there is one, and return it. `what` is for errors."""
    if group is not None:
        guarded(lambda: dist.all_reduce(values, op=op, group=group), what)
    return values


def gather_rows(
    tensor: torch.Tensor, counts: Sequence[int], group: Any, what: str, only: int | None = None
) -> list[torch.Tensor]:
    """Return the first rows of every rank's tensor, as many as `counts` says for each, by rank in `group`.

    With `only`, that global rank alone gets them, and the others an empty list. `what` is for error messages.
    """
    most = max(counts)
    # A collective takes tensors of one shape, without gaps; what is added is cut off again behind it.
    rows = tensor[:most].contiguous()
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    parts = [torch.empty_like(rows) for _ in counts] if only is None or only == dist.get_rank() else []
    if only is None:
        guarded(lambda: dist.all_gather(parts, rows, group=group), what)
    else:
        guarded(lambda: dist.gather(rows, parts or None, dst=only, group=group), what)
    return [part[:count] for part, count in zip(parts, counts, strict=False)]


ROUND_BYTES = 2**28
"""Limit of the bytes that a rank receives in one round, the extra memory of a move; a single item may exceed it."""


@dataclass(frozen=True)
class Parcel:
    """One contiguous tensor of a move, sent to or received from global rank `peer`. `what` is for error messages."""

    tensor: torch.Tensor
    peer: int
    is_leaving: bool
    what: str


def in_rounds(sizes: Sequence[int], limit: int | None = None) -> list[range]:
    """Split items of `sizes` bytes into rounds of consecutive indices, of `ROUND_BYTES` or another limit. Pure.

    Ranks that move them in rounds must give the same sizes.
    """
    limit = ROUND_BYTES if limit is None else limit
    rounds: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            rounds.append(range(start, index))
            start, total = index, 0
        total += size
    return [*rounds, range(start, len(sizes))] if sizes else []


# Of the process, not of a topology: connections outlast the trainers that made them.
_connected: set[tuple[int, bool]] = set()
"""Ranks that this one has sent device tensors to, or received from, over the world group."""


def carry(parcels: Sequence[Parcel], control: Any, timeout: float) -> None:
    """Run this rank's transfers of one round; messages between two ranks match by order.

    Device tensors go over the world group, which uses the device's backend and has run a collective; CPU tensors go
    over `control`, a gloo group of all participating ranks.

    Raises:
        PeerLostError: a rank died, or `timeout` seconds passed.
    """
    works: list[tuple[Any, Parcel]] = []
    # Both kinds are started before any wait: in a round ranks send to each other.
    for group, is_cpu in ((control, True), (None, False)):
        part = [parcel for parcel in parcels if parcel.tensor.is_cpu == is_cpu and parcel.tensor.numel()]
        if part and not is_cpu:
            _make_room(part)
        if part:
            started = guarded(partial(_start, part, group), f"moving {part[0].what}")
            # NCCL returns one handle for the whole batch.
            works += zip(started, part, strict=len(started) == len(part))
    for work, parcel in works:
        wait_for(work, timeout if parcel.tensor.is_cpu else None, f"moving {parcel.what}")


def _make_room(parcels: Sequence[Parcel]) -> None:
    """Give the memory that torch holds unused back to the device if a pair of ranks is about to be connected.

    A connection allocates its buffers past torch's allocator.
    """
    ways = {(parcel.peer, parcel.is_leaving) for parcel in parcels}
    if not ways <= _connected:
        torch.cuda.empty_cache()
        _connected.update(ways)


def _start(parcels: Sequence[Parcel], group: Any) -> list[Any]:
    transfers = []
    for parcel in parcels:
        make = sending if parcel.is_leaving else receiving
        # Backends support different dtypes; all of them support bytes.
        transfers.append(make(parcel.tensor.reshape(-1).view(torch.uint8), parcel.peer, group))
    return post(transfers)
