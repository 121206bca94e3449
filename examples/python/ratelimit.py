"""Runs a command if weir admits it, by Envoy's protocol.

    python3 ratelimit.py HOST:PORT ACCOUNT COMMAND…
"""

import logging
import os
import random
import subprocess
import sys
import time

import grpc
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc
from google.protobuf import json_format
from weir.v1 import lease_pb2, lease_pb2_grpc

TIMEOUT = float(os.environ.get("WEIR_TIMEOUT", "1"))  # seconds, of each call
ATTEMPTS = 4
PATIENCE = 30.0  # seconds, over all attempts
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

unchecked = 0  # how often work began without weir's word: a metric to alert on


class Refused(Exception):
    """weir's no. retry_after: seconds, or None if asking again can't help."""

    def __init__(self, told):
        super().__init__(f"refused: {told['reason']}, class {told['reject_class']}")
        self.retry_after = told.get("retry_after_ms", 1000) / 1000 if told["retryable"] else None


def ask(limits, domain, descriptors):
    """Returns the lease, or None if there is nothing to release. Raises Refused."""
    global unchecked
    request = rls_pb2.RateLimitRequest(domain=domain)
    for entries in descriptors:
        descriptor = request.descriptors.add()
        for key, value in entries.items():
            descriptor.entries.add(key=key, value=value)
    try:
        answer = limits.ShouldRateLimit(request, timeout=TIMEOUT)
    except grpc.RpcError as error:
        if error.code() not in AWAY:
            raise  # a mistake in the request or in the set-up
        unchecked += 1
        logging.warning("weir is away, %s: unchecked %d", error.code().name, unchecked)
        return None
    told = json_format.MessageToDict(answer.dynamic_metadata)
    if answer.overall_code == rls_pb2.RateLimitResponse.OVER_LIMIT:
        raise Refused(told)
    return told.get("lease_id")


def ask_patiently(*args):
    """Asks again when weir said that it helps, and a little later, so that not all come at once."""
    end = time.monotonic() + PATIENCE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask(*args)
        except Refused as refused:
            if refused.retry_after is None or attempt == ATTEMPTS:
                raise
            wait = refused.retry_after + random.uniform(0, 0.25)
            if time.monotonic() + wait > end:
                raise
            logging.info("%s; again in %.2f s", refused, wait)
            time.sleep(wait)


def release(leases, lease, outcome):
    """Gives the slots back. It has deadlines of its own, and never raises."""
    request = lease_pb2.ReleaseRequest(lease_ids=[lease], outcome=outcome)
    for pause in (0, 0.1, 0.5):
        time.sleep(pause)
        try:
            answer = leases.Release(request, timeout=TIMEOUT)
            if answer.results[0].status != lease_pb2.RELEASE_STATUS_UNAVAILABLE:
                return
        except grpc.RpcError as error:
            logging.warning("release: %s", error.code().name)
    logging.warning("not released: the slot is free when its lease expires")


def main():
    address, account, *command = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:  # one for the whole process
        limits = rls_pb2_grpc.RateLimitServiceStub(channel)
        leases = lease_pb2_grpc.LeaseServiceStub(channel)
        try:
            lease = ask_patiently(limits, "inference", [{"account": account}, {"pool": "images"}])
        except Refused as refused:
            sys.exit(str(refused))
        status = 1
        try:
            status = subprocess.call(command)  # your work
        finally:
            if lease:
                release(leases, lease, "ok" if status == 0 else "error")
    sys.exit(status)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
