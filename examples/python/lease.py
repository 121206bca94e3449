"""Runs a command if weir admits it, by weir's own protocol, and for as long as it takes.

    python3 lease.py HOST:PORT ACCOUNT COMMAND…
"""

import logging
import os
import random
import subprocess
import sys
import threading
import time
import uuid

import grpc
from weir.v1 import lease_pb2, lease_pb2_grpc

TIMEOUT = float(os.environ.get("WEIR_TIMEOUT", "1"))  # seconds, of each call
ATTEMPTS = 4
PATIENCE = 30.0  # seconds, over all attempts
ESTIMATE = 10  # lines that a command prints, which are what it costs
LONGEST = 24 * 3600.0  # seconds, of waiting for the next renewal: some systems have no longer timers
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

unchecked = 0  # how often work began without weir's word: a metric to alert on


class Refused(Exception):
    """weir's no. retry_after: seconds, or None if asking again can't help."""

    def __init__(self, verdict):
        whose = lease_pb2.Class.Name(getattr(verdict, "class")).removeprefix("CLASS_").lower()
        super().__init__(f"refused: {verdict.reason}, class {whose}")
        self.retry_after = verdict.retry_after.ToMilliseconds() / 1000 if verdict.retryable else None


def ask(leases, request):
    """Returns the lease, or None if there is nothing to release. Raises Refused.

    Asks once more if there is no answer: what the operation took, it takes once.
    """
    global unchecked
    for last in (False, True):
        request.attempt += 1
        try:
            answer = leases.Acquire(request, timeout=TIMEOUT)
            break
        except grpc.RpcError as error:
            if error.code() not in AWAY:
                raise  # a mistake in the request or in the set-up
            if last:
                unchecked += 1
                logging.warning("weir is away, %s: unchecked %d", error.code().name, unchecked)
                return None
            logging.info("no answer, %s: asking again", error.code().name)
    if not answer.admitted:
        raise Refused(answer.verdict)
    return answer.lease if answer.HasField("lease") else None


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


def keep(leases, lease, ended, lost):
    """Renews the lease until ended is set, and calls lost if it is gone: a thread of its own."""
    wait = lease.renew_after
    while not ended.wait(min(wait.ToMilliseconds() / 1000, LONGEST)):
        try:
            answer = leases.Renew(lease_pb2.RenewRequest(lease_ids=[lease.id]), timeout=TIMEOUT)
        except grpc.RpcError as error:
            logging.warning("renew: %s", error.code().name)
            continue  # there is time for one more try
        result = answer.results[0]
        if result.status == lease_pb2.RENEW_STATUS_LOST:
            logging.warning("the lease is lost: stopping")
            lost()
            return
        if result.status == lease_pb2.RENEW_STATUS_RENEWED:
            wait = result.renew_after


def release(leases, lease, outcome, used):
    """Gives the slots back, and tells what was used. It has deadlines of its own, and never raises."""
    request = lease_pb2.ReleaseRequest(lease_ids=[lease.id], outcome=outcome)
    request.usage.add(lease_id=lease.id).limits.add(hits=used)  # of each limit that reserved
    for pause in (0, 0.1, 0.5):
        time.sleep(pause)
        try:
            answer = leases.Release(request, timeout=TIMEOUT)
            settled = answer.usage[0].limits[0].status != lease_pb2.SETTLEMENT_STATUS_UNAVAILABLE
            if settled and answer.results[0].status != lease_pb2.RELEASE_STATUS_UNAVAILABLE:
                return
        except grpc.RpcError as error:
            logging.warning("release: %s", error.code().name)
    logging.warning("not released: the slot is free when its lease expires")


def main():
    address, account, *command = sys.argv[1:]
    request = lease_pb2.AcquireRequest(domain="inference", operation_id=str(uuid.uuid4()))
    request.descriptors.add().entries.add(key="account", value=account)
    request.descriptors.add().entries.add(key="pool", value="images")
    request.descriptors.add(hits=ESTIMATE).entries.add(key="lines", value=account)
    with grpc.insecure_channel(address) as channel:  # one for the whole process
        leases = lease_pb2_grpc.LeaseServiceStub(channel)
        try:
            lease = ask_patiently(leases, request)
        except Refused as refused:
            sys.exit(str(refused))
        status, used, ended = 1, 0, threading.Event()
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE) as work:  # your work
                try:
                    if lease:
                        threading.Thread(target=keep, args=(leases, lease, ended, work.terminate)).start()
                    for line in work.stdout:  # bytes: they may be no text
                        sys.stdout.buffer.write(line)
                        used += 1
                    status = work.wait()
                finally:
                    work.terminate()  # if this failed: the work must not go on without its slot
        finally:
            ended.set()
            if lease:
                release(leases, lease, "ok" if status == 0 else "error", used)
    sys.exit(status)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
