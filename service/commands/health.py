"""`chairlift health`: the readiness of a server, for scripts and probes."""

import sys
import time
from argparse import ArgumentParser, Namespace

import grpc
from chairlift.inference.v1 import inference_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.bench.number_flags import MAX_SECONDS, real_number
from service.commands.target import host_port


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `health`."""
    parser.add_argument(
        "--target", type=host_port, default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (%(default)s)"
    )
    parser.add_argument(
        "--wait",
        type=real_number(0, MAX_SECONDS),
        default=0.0,
        metavar="SECONDS",
        help="ask until it serves, at most so long (default 0)",
    )


def run(args: Namespace) -> int:
    """0 when requests are taken, else 1 with the reason on stderr."""
    deadline = time.monotonic() + args.wait
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(args.target, [("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            left_s = deadline - time.monotonic()
            try:
                status = stub.Check(request, timeout=max(left_s, 1.0), wait_for_ready=left_s > 0).status
                answer = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            except grpc.RpcError as error:
                answer = " ".join(f"{error.code().name}: {error.details()}".split())
            if answer == "SERVING":
                print(answer)
                return 0
            if left_s <= 0:
                print(f"{args.target}: {answer}", file=sys.stderr)
                return 1
            time.sleep(min(0.1, left_s))
