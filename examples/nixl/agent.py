"""Read the memory of another process with NIXL, and let it read ours.

Without other settings this uses CPU memory, and TCP on the loopback interface only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from kvlayout import Descriptor
from records import Moved, Peer

os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # NIXL also raises each error that it logs
from nixl._api import nixl_agent, nixl_agent_config

_PATIENCE = 30
"""Seconds to wait for a transfer or a notification."""


class Agent:
    """The NIXL agent of a worker, with its memory registered.

    Args:
        name: The name of the agent, different for each worker.
        memory: The worker's pool, as bytes. The agent keeps a reference to it.
    """

    def __init__(self, name: str, memory: np.ndarray) -> None:
        self._memory = memory
        self._address = memory.ctypes.data
        self._agent = nixl_agent(name, nixl_agent_config(capture_telemetry=True))
        self._agent.register_memory([(self._address, memory.nbytes, 0, "")], "DRAM")
        self._owner = ""
        self._remote_address = 0

    @property
    def peer(self) -> Peer:
        """The data that another agent needs to read from this one."""
        return Peer(self._agent.get_agent_metadata(), self._address)

    def connect(self, peer: Peer) -> None:
        """Store the agent whose memory `read` reads."""
        self._owner = self._agent.add_remote_agent(peer.metadata)
        self._remote_address = peer.address

    def read(
        self, remote: Sequence[Descriptor], local: Sequence[Descriptor], message: str
    ) -> Moved:
        """Read pieces of the connected agent's memory, and send it a message after the last one.

        As in vLLM, the lists of descriptors are prepared first, and a transfer refers to them by
        index. NIXL merges neighbors only in prepared lists.

        Args:
            remote: The pieces to read, relative to the connected agent's memory.
            local: Where each piece goes, relative to our memory; the same number and sizes.
            message: The message, which the other side gets from `list_messages`.

        Raises:
            ValueError: The transfer fails, or takes longer than 30 seconds. The content
                of the local pieces is then undefined.
        """
        sides = [
            self._agent.prep_xfer_dlist(
                name, [(address + start, size, 0) for start, size in descriptors], "DRAM"
            )
            for name, address, descriptors in (
                ("NIXL_INIT_AGENT", self._address, local),
                (self._owner, self._remote_address, remote),
            )
        ]
        indices = list(range(len(local)))
        handle = self._agent.make_prepped_xfer(
            "READ", sides[0], indices, sides[1], indices, message.encode()
        )
        state = self._agent.transfer(handle)
        end = time.monotonic() + _PATIENCE
        while state == "PROC" and time.monotonic() < end:
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise ValueError(f"NIXL did not read the blocks: {state}")
        telemetry = self._agent.get_xfer_telemetry(handle)
        for each in (handle, *sides):
            each.release()
        return Moved(len(local), telemetry.descCount, telemetry.totalBytes)

    def list_messages(self) -> list[str]:
        """Return the messages since the last call, from agents that have read this memory."""
        return [
            message.decode()
            for messages in self._agent.get_new_notifs().values()
            for message in messages
        ]
