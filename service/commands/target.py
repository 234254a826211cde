"""The server that a command talks to, as `--target` names it."""

from argparse import ArgumentTypeError


def host_port(text: str) -> str:
    """`text`, when it names a port, or a socket as gRPC writes it. Raises ArgumentTypeError."""
    _, colon, port = text.rpartition(":")
    if not colon or not port:
        raise ArgumentTypeError(f"{text}: no port, use HOST:PORT")
    return text
