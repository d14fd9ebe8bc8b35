"""The sockets that one API server shares with every engine, apart from its HTTP so that launchers need not load that."""

from __future__ import annotations

import zmq
from msgspec import Struct

from dp_engine.endpoints import bind_socket
from dp_engine.modes import Launch
from dp_engine.versions import Wire


class DataEndpoints(Struct, frozen=True, kw_only=True):
    """Where engines reach one API server."""

    inputs: str
    outputs: str


class DataSockets(Struct, frozen=True, kw_only=True):
    """Requests go out on `inputs` (ROUTER), answers come in on `outputs` (PULL); both bound."""

    context: zmq.Context[zmq.Socket[bytes]]
    inputs: zmq.Socket[bytes]
    outputs: zmq.Socket[bytes]
    endpoints: DataEndpoints


def bind_data_sockets(context: zmq.Context[zmq.Socket[bytes]], launch: Launch, wire: Wire) -> DataSockets:
    """Raises zmq.ZMQError when the head's address is not an address of this machine."""
    inputs, input_address = bind_socket(context, zmq.ROUTER, host=launch.address, local_only=launch.clients_are_local)
    if launch.elastic_ep and wire.elastic_inputs_handover:
        inputs.setsockopt(zmq.ROUTER_HANDOVER, 1)
    outputs, output_address = bind_socket(context, zmq.PULL, host=launch.address, local_only=launch.clients_are_local)
    endpoints = DataEndpoints(inputs=input_address, outputs=output_address)
    return DataSockets(context=context, inputs=inputs, outputs=outputs, endpoints=endpoints)
