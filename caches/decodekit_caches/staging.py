"""Two places on the device through which layers that live in host memory pass, copied while others are at work."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from decodekit import InputError
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Lane:
    """A stream beside the one that computes. Where a device has none, copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device) if device.type != "cpu" else None
        able = self._module is not None and hasattr(self._module, "Stream") and hasattr(self._module, "current_stream")
        self.device = device
        self.stream: Any = self._module.Stream(device=device) if able and self._module is not None else None

    def after_compute(self) -> None:
        """What is copied from now on waits for what has been computed so far."""
        if self.stream is not None and self._module is not None:
            self.stream.wait_stream(self._module.current_stream(self.device))

    def before_compute(self) -> None:
        """What is computed from now on waits for what has been copied so far."""
        if self.stream is not None and self._module is not None:
            self._module.current_stream(self.device).wait_stream(self.stream)

    def beside(self) -> Any:
        """A context in which copies go beside the computation."""
        return contextlib.nullcontext() if self.stream is None else self._module.stream(self.stream)  # type: ignore[union-attr]

    def mark(self) -> Any:
        """A point that `wait` waits for: all that has been copied so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: Any) -> None:
        """What is computed from now on waits for what had been copied at that point."""
        if mark is not None and self._module is not None:
            self._module.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        """Wait here until everything is copied."""
        if self.stream is not None:
            self.stream.synchronize()


class _Place:
    """Device memory for one layer, [capacity, B, H, D] twice."""

    def __init__(self) -> None:
        self.layer: Any = None
        self.mark: Any = None
        self.held: Pair | None = None

    def fits(self, host: Pair, device: torch.device) -> bool:
        if self.held is None or self.held[0].device != device:
            return False
        return all(
            mine.shape[0] >= yours.shape[2] and mine.shape[1:] == _turned(yours).shape[1:] and mine.dtype == yours.dtype
            for mine, yours in zip(self.held, host, strict=True)
        )


def _turned(buffer: Tensor) -> Tensor:
    """A buffer [B, H, capacity, D] as it lies in memory, [capacity, B, H, D]."""
    return buffer.permute(2, 0, 1, 3)


class Staging:
    """Brings the layers of one cache to the device, each before its turn, and new tokens back to the host."""

    def __init__(self) -> None:
        self._order: list[Any] = []
        self._places = (_Place(), _Place())
        self.lane: Lane | None = None
        """Beside the computation on the device; None until something had to be copied."""

    def idle(self, device: torch.device) -> bool:
        """Whether nothing has to be copied: the model computes where the layers are."""
        return device.type == "cpu"

    def begin(self, device: torch.device) -> None:
        """From now on layers lie in memory that can be copied to this device. Raises `InputError` for another one."""
        if self.lane is None:
            self.lane = Lane(device)
        elif self.lane.device != device:
            raise InputError(f"an offloaded cache serves one device, and layers are on {self.lane.device} and {device}")

    def another(self) -> Staging:
        """One of the same kind, for other layers."""
        return type(self)()

    def follow(self, layer: Any) -> None:
        """This layer comes after those named so far, and the first one after the last."""
        self._order.append(layer)

    def host(self, like: Tensor, capacity: int) -> Tensor:
        """Host memory for a layer, [B, H, capacity, D], that a device can copy from beside its computations."""
        shape = (capacity, like.shape[0], like.shape[1], like.shape[3])
        pinned = self.lane is not None and self.lane.device.type == "cuda"
        with torch.inference_mode(False):
            made = torch.empty(shape, dtype=like.dtype, pin_memory=pinned)
        return made.permute(1, 2, 0, 3)

    def settle(self) -> None:
        """Wait until the host has everything: before anything there is read or changed."""
        if self.lane is not None:
            self.lane.settle()

    def clear(self) -> None:
        """`settle`, and forget what is on the device: the host is about to change."""
        self.settle()
        for place in self._places:
            place.layer = None

    def append(self, layer: Any, new: Pair) -> Pair:
        """Write `new` [B, H, Q, D] behind what a layer with room for it holds.

        Returns all of it on the device, [B, H, T, D] views that hold until the layer after the next is appended to.
        """
        lane, host, start, end = self.lane, layer.buffers, layer.length, layer.length + new[0].shape[2]
        assert lane is not None
        place = next((place for place in self._places if place.layer is layer), None)
        if place is None or not place.fits(host, lane.device):
            place = self._places[0] if place is None else place
            self._bring(place, layer)
        lane.wait(place.mark)
        assert place.held is not None
        for mine, fresh in zip(place.held, new, strict=True):
            mine[start:end].copy_(fresh.permute(2, 0, 1, 3))
        lane.after_compute()
        with lane.beside():
            for mine, yours in zip(place.held, host, strict=True):
                _turned(yours)[start:end].copy_(mine[start:end], non_blocking=True)
        other = self._places[1] if place is self._places[0] else self._places[0]
        follower = self._order[(self._order.index(layer) + 1) % len(self._order)]
        if follower is not layer and follower.length and follower.buffers is not None:
            self._bring(other, follower)
        keys, values = (mine[:end].permute(1, 2, 0, 3) for mine in place.held)
        return keys, values

    def _bring(self, place: _Place, layer: Any) -> None:
        """Start to copy what a layer holds to a place, once nobody computes with what is there."""
        lane, host, length = self.lane, layer.buffers, layer.length
        assert lane is not None
        for each in self._places:
            each.layer = None if each.layer is layer else each.layer
        place.layer = layer
        if not place.fits(host, lane.device):
            with torch.inference_mode(False):
                a, b = (torch.empty_like(_turned(buffer), device=lane.device) for buffer in host)
            place.held = a, b
            if lane.stream is not None:
                for made in place.held:
                    made.record_stream(lane.stream)  # freed memory must not be used again while it is being copied
        assert place.held is not None
        lane.after_compute()
        with lane.beside():
            for mine, yours in zip(place.held, host, strict=True):
                mine[:length].copy_(_turned(yours)[:length], non_blocking=True)
        place.mark = lane.mark()
