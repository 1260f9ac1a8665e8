"""The stream agent: reads over TLS 1.3 on TCP, for links that are not trusted."""

from bridge.transfer.stream.agent import StreamAgent, StreamPeer, StreamRegistration, StreamTransfer

__all__ = ["StreamAgent", "StreamPeer", "StreamRegistration", "StreamTransfer"]
